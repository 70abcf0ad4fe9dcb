"""The step's three Triton kernels; `cuda` launches them and `cuda_tables` lays out what they read.

    d = scale·g + λ·w + c·δ
    m ← a·m − e·d
    s = b·m − f·d − z·w
    w ← w + s
    δ ← h·(δ + s)

`update_kernel` is that, once over the weights, with the sum of the new δ² of each program on the
way. `scalars_kernel` runs before it in one program: it adds those sums up to r², ticks the clock,
finds the phase and writes each group's row (a e b f z h c λ scale). `settle_kernel` only adds up.

Nothing here is read by the host, so a captured graph replays while clock, phase, r and a tensor
learning rate go on. A coefficient of exactly zero drops its term: a NaN in an old iterate does not
survive a reset, and an infinite gradient moves no weight there.

Two things to know before changing a line. A hint such as `multiple_of` marks the operation that
made the value, wherever that value is used, so pointers are made inside the branch that may rely
on the hint. And threads that have nothing of their own to do repeat the work of others: what a
program both reads and writes through a scalar needs a barrier in between.
"""

# Triton reads the annotations of these functions, and they are not those of Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

# A record, one for each tensor: int64.
RECORD = tl.constexpr(8)
AT_WEIGHT = tl.constexpr(0)  # addresses
AT_ITERATE = tl.constexpr(1)
AT_OFFSET = tl.constexpr(2)
AT_SIZE = tl.constexpr(3)  # elements
AT_FIRST = tl.constexpr(4)  # the program that takes the tensor's first block

# The settings: one header, then one entry for each group; int64 and float64 side by side.
ENTRY = tl.constexpr(8)
AT_WARMUP = tl.constexpr(0)  # header, int64
AT_INTERVAL = tl.constexpr(1)  # between resets after the last one in the table; 0: none
AT_RESETS = tl.constexpr(2)  # entries of the table
AT_BOUNDED = tl.constexpr(3)
AT_CUBIC = tl.constexpr(4)  # header, float64
AT_REPULSIVE = tl.constexpr(5)
AT_AVERAGE = tl.constexpr(6)
AT_LR_ADDRESS = tl.constexpr(0)  # group, int64
AT_LR_BITS = tl.constexpr(1)  # 32 or 64: the float behind the address; 0: the number below
AT_LAST_MOMENTUM = tl.constexpr(2)  # address of a float64
AT_LR = tl.constexpr(3)  # group, float64
AT_MOMENTUM = tl.constexpr(4)
AT_L2_DECAY = tl.constexpr(5)
AT_DECOUPLED_DECAY = tl.constexpr(6)
AT_SIGN = tl.constexpr(7)

# A row, one for each group: float64, on a cache line of its own.
ROW = tl.constexpr(16)
AT_KEEP = tl.constexpr(0)  # a
AT_GAIN = tl.constexpr(1)  # e
AT_CARRY = tl.constexpr(2)  # b
AT_PUSH = tl.constexpr(3)  # f
AT_SHRINK = tl.constexpr(4)  # z
AT_FOLLOW = tl.constexpr(5)  # h
AT_FORCE = tl.constexpr(6)  # c
AT_DECAY = tl.constexpr(7)  # λ
AT_SCALE = tl.constexpr(8)  # of the gradient: sign / grad_scale
AT_PHASE = tl.constexpr(9)

WARMUP = tl.constexpr(0)
RESET = tl.constexpr(1)
ITERATE = tl.constexpr(2)
SKIP = tl.constexpr(3)  # an overflow was found: nothing happens and nothing counts

REDUCE = tl.constexpr(8192)  # partial sums added at a time; their number is a multiple of it
SCAN = tl.constexpr(256)  # reset times compared at a time
CHUNK = tl.constexpr(32)  # groups at a time


# ---------------------------------------------------------------------- scalars


@triton.jit
def _sum_of(partials, count):
    """The same additions in the same order every time, so the same bits."""
    lanes = tl.arange(0, REDUCE)
    total = tl.zeros((REDUCE,), tl.float64)
    first = tl.full((), 0, tl.int32)
    while first < count:
        total += tl.load(partials + first + lanes)
        first += REDUCE
    return tl.sum(total)


@triton.jit
def _is_reset(t, resets, settings):
    """Whether t stands in the table, or a whole number of intervals after its end."""
    count = tl.load(settings + AT_RESETS)
    interval = tl.load(settings + AT_INTERVAL)
    lanes = tl.arange(0, SCAN)
    hits = tl.zeros((SCAN,), tl.int32)
    first = tl.full((), 0, tl.int32)
    while first < count:
        times = tl.load(resets + first + lanes, mask=first + lanes < count, other=0)
        hits += (times == t).to(tl.int32)
        first += SCAN
    beyond = t - tl.load(resets + count - 1)
    again = (interval > 0) & (beyond > 0) & (beyond % tl.maximum(interval, 1) == 0)
    return ((tl.sum(hits) > 0) | again) & (t > 0)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["distance_squared"])
def settle_kernel(distance_squared, pending, partials, count):
    if tl.load(pending) != 0:
        total = _sum_of(partials, count)
        tl.debug_barrier()  # every thread has read what is now written
        tl.store(distance_squared, total)
        tl.store(pending, 0)


# Numbers and alignments that may change from step to step must not compile anything anew.
@triton.jit(
    do_not_specialize=["count", "groups"],
    do_not_specialize_on_alignment=["clock", "distance_squared", "found_inf", "grad_scale"],
)
def scalars_kernel(
    clock,
    distance_squared,
    pending,
    partials,
    count,
    found_inf,
    grad_scale,
    settings,  # int64
    numbers,  # float64: the same memory
    groups,
    resets,
    rows,
    OFFSETS: tl.constexpr,
):
    skip = tl.full((), 0, tl.int1)
    if found_inf is not None:
        skip = tl.load(found_inf) != 0
    if skip:
        first = tl.full((), 0, tl.int32)
        while first < groups:
            group = first + tl.arange(0, CHUNK)
            tl.store(rows + group * ROW + AT_PHASE, SKIP, mask=group < groups)
            first += CHUNK
    else:
        now = tl.load(clock) + 1
        squared = tl.zeros((), tl.float64)
        if OFFSETS:
            squared = tl.load(distance_squared)
            if tl.load(pending) != 0:
                squared = _sum_of(partials, count)
        t = tl.maximum(now - tl.load(settings + AT_WARMUP), 0)
        resetting = _is_reset(t, resets, settings)
        warming = t == 0
        iterating = (t > 0) & (resetting == 0)
        phase = tl.where(warming, WARMUP, tl.where(resetting, RESET, ITERATE))

        cubic = tl.load(numbers + AT_CUBIC)
        repulsive = tl.load(numbers + AT_REPULSIVE)
        average = tl.load(numbers + AT_AVERAGE)
        bounded = tl.load(settings + AT_BOUNDED) != 0
        distance = tl.sqrt(squared)
        cube = distance * squared
        ramp = 1.0 - 1.0 / (1 + t).to(tl.float64)
        inverse_scale = tl.full((), 1.0, tl.float64)
        if grad_scale is not None:
            inverse_scale = 1.0 / tl.load(grad_scale).to(tl.float64)

        first = tl.full((), 0, tl.int32)
        while first < groups:
            group = first + tl.arange(0, CHUNK)
            known = group < groups
            entry = (group + 1) * ENTRY
            address = tl.load(settings + entry + AT_LR_ADDRESS, mask=known, other=0)
            bits = tl.load(settings + entry + AT_LR_BITS, mask=known, other=0)
            lr = tl.load(numbers + entry + AT_LR, mask=known, other=0.0)
            double = address.to(tl.pointer_type(tl.float64))
            single = address.to(tl.pointer_type(tl.float32))
            lr = tl.where(bits == 64, tl.load(double, mask=bits == 64, other=0.0), lr)
            lr32 = tl.load(single, mask=bits == 32, other=0.0).to(tl.float64)
            lr = tl.where(bits == 32, lr32, lr)

            peak = tl.load(numbers + entry + AT_MOMENTUM, mask=known, other=0.0)
            momentum = tl.where(peak < ramp, peak, ramp)  # the ramp is 0 in the warm-up
            last = tl.load(settings + entry + AT_LAST_MOMENTUM, mask=known, other=0)
            tl.store(last.to(tl.pointer_type(tl.float64)), momentum, mask=known)

            # β/R³ with R = max(r, r*) needs no cube root: R³ = max(r³, r*³). Written so that a
            # NaN distance stays one.
            settled = average * lr * repulsive / ((1.0 - average) * (1.0 - momentum))
            reach = tl.where(bounded & (cube < settled), settled, cube)
            repulsion = tl.where(reach == 0, 0.0, repulsive / tl.where(reach == 0, 1.0, reach))
            force = cubic * distance - repulsion

            decoupled = tl.load(numbers + entry + AT_DECOUPLED_DECAY, mask=known, other=0.0)
            decay = tl.load(numbers + entry + AT_L2_DECAY, mask=known, other=0.0)
            sign = tl.load(numbers + entry + AT_SIGN, mask=known, other=0.0)
            carry = tl.where(iterating, momentum, 0.0)
            row = rows + group * ROW
            tl.store(row + AT_KEEP, tl.where(warming, 1.0, carry), mask=known)
            tl.store(row + AT_GAIN, tl.where(warming, 0.0, lr), mask=known)
            tl.store(row + AT_CARRY, carry, mask=known)
            tl.store(row + AT_PUSH, tl.where(resetting, 0.0, lr), mask=known)
            tl.store(row + AT_SHRINK, tl.where(resetting, 0.0, lr * decoupled), mask=known)
            tl.store(row + AT_FOLLOW, tl.where(iterating, average, 1.0), mask=known)
            tl.store(row + AT_FORCE, tl.where(iterating, force, 0.0), mask=known)
            tl.store(row + AT_DECAY, decay, mask=known)
            tl.store(row + AT_SCALE, sign * inverse_scale, mask=known)
            tl.store(row + AT_PHASE, phase, mask=known)
            first += CHUNK

        tl.debug_barrier()  # every thread has read what is now written
        tl.store(clock, now)
        if OFFSETS:
            tl.store(distance_squared, squared)
            tl.store(pending, 1)


# ---------------------------------------------------------------------- the weights


@triton.jit
def _mixed(bits):
    """A hash of 32 bits to 32 bits, two multiplications deep."""
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= bits >> 15
    bits *= 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _noise(clock, tensor, start, lanes):
    """32 bits for each element, the same for the same step, tensor and element."""
    now = tl.load(clock)
    key = _mixed(now.to(tl.uint32))
    key = _mixed(key ^ (now >> 32).to(tl.uint32))
    key = _mixed(key ^ tensor.to(tl.uint32))
    key = _mixed(key ^ (start >> 32).to(tl.uint32))
    return _mixed(key ^ (start.to(tl.uint32) + lanes.to(tl.uint32)))


@triton.jit
def _widened(values, DTYPE: tl.constexpr):
    """To the dtype of the arithmetic. bfloat16 in integers, as the interpreter errs below 1e-38."""
    if values.dtype.is_bf16():
        values = (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(
            tl.float32, bitcast=True
        )
    return values.to(DTYPE)


@triton.jit
def _narrowed(values, noise, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """To the dtype of storage. bfloat16 in integers, because the interpreter's cast truncates.

    To nearest, ties to even; or up with the probability of the part cut off. NaN stays NaN.
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
    """Their product, and zero where the coefficient is zero, whatever the values."""
    return coefficient * tl.where(coefficient != 0, values, 0.0)


@triton.jit
def _at(address, start, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    """A pointer to an element, promised to lie on a whole vector (VECTOR = 1: no promise)."""
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
    decay,
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
    """One block, and the sum of its new δ²; addresses and count are whole vectors."""
    lanes = tl.arange(0, BLOCK)
    here = lanes < count // VECTOR * VECTOR  # no change, but now the compiler knows
    weight_at = _at(weight_address, start, WEIGHT_TYPE, VECTOR) + lanes
    gradient_at = _at(gradient_address, start, GRADIENT_TYPE, VECTOR) + lanes
    iterate_at = _at(iterate_address, start, ITERATE_TYPE, VECTOR) + lanes
    weight = _widened(tl.load(weight_at, mask=here, other=0.0), ARITHMETIC)
    gradient = _widened(tl.load(gradient_at, mask=here, other=0.0), ARITHMETIC)
    iterate = _widened(tl.load(iterate_at, mask=here, other=0.0), ARITHMETIC)
    if OFFSET_TYPE is not None:
        offset_at = _at(offset_address, start, OFFSET_TYPE, VECTOR) + lanes
        offset = _widened(tl.load(offset_at, mask=here, other=0.0), ARITHMETIC)

    direction = scale * gradient + _term(decay, weight)
    if OFFSET_TYPE is not None:
        direction += _term(force, offset)
    iterate = _term(keep, iterate) - _term(gain, direction)
    change = _term(carry, iterate) - _term(push, direction) - _term(shrink, weight)

    noise = lanes.to(tl.uint32)
    if STOCHASTIC:
        noise = _noise(clock, tensor, start, lanes)
    tl.store(weight_at, _narrowed(weight + change, noise, WEIGHT_TYPE, False), mask=here)
    stored = _narrowed(iterate, noise & 0xFFFF, ITERATE_TYPE, STOCHASTIC)
    tl.store(iterate_at, stored, mask=here)
    total = tl.zeros((), ARITHMETIC)
    if OFFSET_TYPE is not None:
        moved = _narrowed(_term(follow, offset + change), noise >> 16, OFFSET_TYPE, STOCHASTIC)
        tl.store(offset_at, moved, mask=here)
        kept = _widened(moved, ARITHMETIC)  # r is the norm of what is stored
        total = tl.sum(kept * kept)
    return total


@triton.jit
def _sit_out(
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
    """A block without a gradient: m starts anew at a reset, δ counts in r, nothing else moves."""
    lanes = tl.arange(0, BLOCK)
    here = lanes < count
    if phase == RESET:
        iterate_at = _at(iterate_address, start, ITERATE_TYPE, 1) + lanes
        tl.store(iterate_at, tl.zeros((BLOCK,), ITERATE_TYPE), mask=here)
    total = tl.zeros((), ARITHMETIC)
    if OFFSET_TYPE is not None:
        offset_at = _at(offset_address, start, OFFSET_TYPE, 1) + lanes
        kept = _widened(tl.load(offset_at, mask=here, other=0.0), ARITHMETIC)
        total = tl.sum(kept * kept)
    return total


@triton.jit(do_not_specialize=["base"], do_not_specialize_on_alignment=["clock"])
def update_kernel(
    programs,  # int32, for each program its tensor and its group
    records,
    gradients,  # int64, for each tensor the address of its gradient; 0: it has none
    rows,
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
    row = rows + group * ROW
    phase = tl.load(row + AT_PHASE)
    keep = tl.load(row + AT_KEEP).to(ARITHMETIC)
    gain = tl.load(row + AT_GAIN).to(ARITHMETIC)
    carry = tl.load(row + AT_CARRY).to(ARITHMETIC)
    push = tl.load(row + AT_PUSH).to(ARITHMETIC)
    shrink = tl.load(row + AT_SHRINK).to(ARITHMETIC)
    follow = tl.load(row + AT_FOLLOW).to(ARITHMETIC)
    force = tl.load(row + AT_FORCE).to(ARITHMETIC)
    decay = tl.load(row + AT_DECAY).to(ARITHMETIC)
    scale = tl.load(row + AT_SCALE).to(ARITHMETIC)

    start = (program - first) * BLOCK  # int64, as `first` is
    # A step that skips has nothing to do, rather than a branch that would wait for the phase
    # before the other loads begin.
    goes = phase != SKIP
    count = tl.where(goes, tl.minimum(size - start, BLOCK), 0).to(tl.int32)
    aligned = ((weight | gradient | iterate | offset) & 15) == 0
    total = tl.zeros((), ARITHMETIC)
    HALF: tl.constexpr = BLOCK // 2
    if gradient == 0:
        total = _sit_out(
            iterate, offset, start, count, phase, ITERATE_TYPE, OFFSET_TYPE, ARITHMETIC, BLOCK
        )
    elif aligned & (count % VECTOR == 0):
        total = _update_block(
            weight, gradient, iterate, offset, tensor, start, count,
            keep, gain, carry, push, shrink, follow, force, decay, scale, clock,
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
                keep, gain, carry, push, shrink, follow, force, decay, scale, clock,
                WEIGHT_TYPE, GRADIENT_TYPE, ITERATE_TYPE, OFFSET_TYPE, ARITHMETIC,
                HALF, 1, STOCHASTIC,
            )  # fmt: skip
            done += HALF
    if OFFSET_TYPE is not None:
        tl.store(partials + program, total.to(tl.float64), mask=goes)
