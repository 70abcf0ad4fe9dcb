"""The Triton kernel of the update: one pass over the weights.

The equations are those of :mod:`neumann.optim.update`; each program also stores the sum of its new
δ². Coefficients come from `scalars_kernel`, addresses from `layout`. A coefficient of exactly zero
drops its term.

A hint such as `multiple_of` marks the operation that made a value, wherever that value is used. So
pointers are made inside the branch that may rely on the hint; made outside, the branch for
unaligned tensors would promise alignment too.
"""

# Triton reads the annotations of these functions; they are not Python's.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from neumann.optim.backends.cuda.scalars_kernel import (
    AT_CARRY,
    AT_DECAY,
    AT_FOLLOW,
    AT_FORCE,
    AT_GAIN,
    AT_KEEP,
    AT_PHASE,
    AT_PUSH,
    AT_SCALE,
    AT_SHRINK,
    COEFFICIENTS,
    RESET,
    SKIP,
)

# A record for each tensor: int64.
RECORD = tl.constexpr(8)
AT_WEIGHT = tl.constexpr(0)  # addresses
AT_ITERATE = tl.constexpr(1)
AT_OFFSET = tl.constexpr(2)
AT_SIZE = tl.constexpr(3)  # elements
AT_FIRST = tl.constexpr(4)  # the program that takes the tensor's first block


@triton.jit
def _mix(bits):
    """A hash from 32 bits to 32 bits."""
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= bits >> 15
    bits *= 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _noise(clock, tensor, start, lanes):
    """32 bits for each element, a function of step, tensor and element."""
    now = tl.load(clock)
    key = _mix(now.to(tl.uint32))
    key = _mix(key ^ (now >> 32).to(tl.uint32))
    key = _mix(key ^ tensor.to(tl.uint32))
    key = _mix(key ^ (start >> 32).to(tl.uint32))
    return _mix(key ^ (start.to(tl.uint32) + lanes.to(tl.uint32)))


@triton.jit
def _widen(values, DTYPE: tl.constexpr):
    """To the dtype of the arithmetic; bfloat16 as integers, as the interpreter errs below 1e-38."""
    if values.dtype.is_bf16():
        values = (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(
            tl.float32, bitcast=True
        )
    return values.to(DTYPE)


@triton.jit
def _narrow(values, noise, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """To the dtype of storage; bfloat16 as integers, because the interpreter's cast truncates.

    Rounds to nearest, ties to even, or up with the probability of the part cut off. NaN stays NaN.
    """
    if DTYPE.is_bf16():
        bits = values.to(tl.float32).to(tl.uint32, bitcast=True)
        rounded = bits + noise if STOCHASTIC else bits + 0x7FFF + ((bits >> 16) & 1)
        rounded = tl.where(values == values, rounded, bits | 0x400000)
        result = (rounded >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = values.to(DTYPE)
    return result


@triton.jit
def _term(coefficient, values):
    """The product, and zero if the coefficient is zero, whatever the values are."""
    return coefficient * tl.where(coefficient != 0, values, 0.0)


@triton.jit
def _at(address, start, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    """A pointer to an element, promised to be aligned to a vector (VECTOR = 1: no promise)."""
    BYTES: tl.constexpr = VECTOR * DTYPE.primitive_bitwidth // 8
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), BYTES) + start


@triton.jit
def _update_block(
    weight_address,
    gradient_address,
    iterate_address,
    offset_address,
    tensor,
    start,
    count,
    keep,
    gain,
    carry,
    push,
    shrink,
    follow,
    force,
    weight_decay,
    scale,
    clock,
    WEIGHT_TYPE: tl.constexpr,
    GRADIENT_TYPE: tl.constexpr,
    ITERATE_TYPE: tl.constexpr,
    OFFSET_TYPE: tl.constexpr,
    ARITHMETIC: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Update one block; returns the sum of its new δ². Addresses and count are whole vectors."""
    lanes = tl.arange(0, BLOCK)
    here = lanes < count // VECTOR * VECTOR  # no change, but the compiler now knows
    weight_at = _at(weight_address, start, WEIGHT_TYPE, VECTOR) + lanes
    gradient_at = _at(gradient_address, start, GRADIENT_TYPE, VECTOR) + lanes
    iterate_at = _at(iterate_address, start, ITERATE_TYPE, VECTOR) + lanes
    weight = _widen(tl.load(weight_at, mask=here, other=0.0), ARITHMETIC)
    gradient = _widen(tl.load(gradient_at, mask=here, other=0.0), ARITHMETIC)
    iterate = _widen(tl.load(iterate_at, mask=here, other=0.0), ARITHMETIC)
    if OFFSET_TYPE is not None:
        offset_at = _at(offset_address, start, OFFSET_TYPE, VECTOR) + lanes
        offset = _widen(tl.load(offset_at, mask=here, other=0.0), ARITHMETIC)

    direction = scale * gradient + _term(weight_decay, weight)
    if OFFSET_TYPE is not None:
        direction += _term(force, offset)
    iterate = _term(keep, iterate) - _term(gain, direction)
    change = _term(carry, iterate) - _term(push, direction) - _term(shrink, weight)

    noise = lanes.to(tl.uint32)
    if STOCHASTIC:
        noise = _noise(clock, tensor, start, lanes)
    tl.store(weight_at, _narrow(weight + change, noise, WEIGHT_TYPE, False), mask=here)
    stored = _narrow(iterate, noise & 0xFFFF, ITERATE_TYPE, STOCHASTIC)
    tl.store(iterate_at, stored, mask=here)
    total = tl.zeros((), ARITHMETIC)
    if OFFSET_TYPE is not None:
        moved = _narrow(_term(follow, offset + change), noise >> 16, OFFSET_TYPE, STOCHASTIC)
        tl.store(offset_at, moved, mask=here)
        kept = _widen(moved, ARITHMETIC)  # r is the norm of what is stored
        total = tl.sum(kept * kept)
    return total


@triton.jit
def _rest_block(
    iterate_address,
    offset_address,
    start,
    count,
    phase,
    ITERATE_TYPE: tl.constexpr,
    OFFSET_TYPE: tl.constexpr,
    ARITHMETIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block without a gradient: a reset zeroes m, δ counts in r, nothing else changes."""
    lanes = tl.arange(0, BLOCK)
    here = lanes < count
    if phase == RESET:
        iterate_at = _at(iterate_address, start, ITERATE_TYPE, 1) + lanes
        tl.store(iterate_at, tl.zeros((BLOCK,), ITERATE_TYPE), mask=here)
    total = tl.zeros((), ARITHMETIC)
    if OFFSET_TYPE is not None:
        offset_at = _at(offset_address, start, OFFSET_TYPE, 1) + lanes
        kept = _widen(tl.load(offset_at, mask=here, other=0.0), ARITHMETIC)
        total = tl.sum(kept * kept)
    return total


@triton.jit(do_not_specialize=["base"], do_not_specialize_on_alignment=["clock"])
def update_kernel(
    programs,  # int32, for each program its tensor and its group
    records,
    gradients,  # int64, for each tensor the address of its gradient; 0: it has none
    coefficients,
    clock,
    partials,
    base,
    WEIGHT_TYPE: tl.constexpr,
    GRADIENT_TYPE: tl.constexpr,
    ITERATE_TYPE: tl.constexpr,
    OFFSET_TYPE: tl.constexpr,  # None: not kept
    ARITHMETIC: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,  # elements of the widest dtype in 16 bytes
    STOCHASTIC: tl.constexpr,
):
    # Two rounds of dependent loads, each as wide as it gets, before the data.
    program = tl.program_id(0) + base
    tensor = tl.load(programs + 2 * program)
    group = tl.load(programs + 2 * program + 1)

    record = records + tensor * RECORD
    weight = tl.load(record + AT_WEIGHT)
    gradient = tl.load(gradients + tensor)
    iterate = tl.load(record + AT_ITERATE)
    offset = tl.load(record + AT_OFFSET)  # 0 where none is kept
    size = tl.load(record + AT_SIZE)
    first = tl.load(record + AT_FIRST)
    own = coefficients + group * COEFFICIENTS
    phase = tl.load(own + AT_PHASE)
    keep = tl.load(own + AT_KEEP).to(ARITHMETIC)
    gain = tl.load(own + AT_GAIN).to(ARITHMETIC)
    carry = tl.load(own + AT_CARRY).to(ARITHMETIC)
    push = tl.load(own + AT_PUSH).to(ARITHMETIC)
    shrink = tl.load(own + AT_SHRINK).to(ARITHMETIC)
    follow = tl.load(own + AT_FOLLOW).to(ARITHMETIC)
    force = tl.load(own + AT_FORCE).to(ARITHMETIC)
    weight_decay = tl.load(own + AT_DECAY).to(ARITHMETIC)
    scale = tl.load(own + AT_SCALE).to(ARITHMETIC)

    start = (program - first) * BLOCK  # int64, as `first` is
    # A step that skips has nothing to do, rather than a branch that would wait for the phase
    # before the other loads begin.
    goes = phase != SKIP
    count = tl.where(goes, tl.minimum(size - start, BLOCK), 0).to(tl.int32)
    aligned = ((weight | gradient | iterate | offset) & 15) == 0
    total = tl.zeros((), ARITHMETIC)
    HALF: tl.constexpr = BLOCK // 2
    if gradient == 0:
        total = _rest_block(
            iterate, offset, start, count, phase, ITERATE_TYPE, OFFSET_TYPE, ARITHMETIC, BLOCK
        )
    elif aligned & (count % VECTOR == 0):
        total = _update_block(
            weight, gradient, iterate, offset, tensor, start, count,
            keep, gain, carry, push, shrink, follow, force, weight_decay, scale, clock,
            WEIGHT_TYPE, GRADIENT_TYPE, ITERATE_TYPE, OFFSET_TYPE, ARITHMETIC,
            BLOCK, VECTOR, STOCHASTIC,
        )  # fmt: skip
    else:
        # Any address and any count, one element at a time. In halves, because Triton gives blocks
        # of one shape one distribution over the threads, and this wants another.
        done = tl.full((), 0, tl.int32)
        while done < count:
            total += _update_block(
                weight, gradient, iterate, offset, tensor, start + done, count - done,
                keep, gain, carry, push, shrink, follow, force, weight_decay, scale, clock,
                WEIGHT_TYPE, GRADIENT_TYPE, ITERATE_TYPE, OFFSET_TYPE, ARITHMETIC,
                HALF, 1, STOCHASTIC,
            )  # fmt: skip
            done += HALF
    if OFFSET_TYPE is not None:
        tl.store(partials + program, total.to(tl.float64), mask=goes)
