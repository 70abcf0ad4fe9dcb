"""Triton kernels that work out a step's coefficients, in one program each.

`scalars_kernel` runs before the update. It adds the last step's partial sums to r², ticks the
clock, finds the phase and writes the coefficients: what `phases` and `distance` compute on the
host. `finish_distance_kernel` only adds up.

The host reads none of it, so a captured graph can be replayed while clock, phase, r and a tensor
learning rate advance. Threads without work of their own repeat that of others, so an address that a
program both reads and writes needs a barrier in between.
"""

# Triton reads the annotations of these functions; they are not Python's.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

# The options: a header, then an entry for each group; int64 and float64 side by side.
ENTRY = tl.constexpr(8)
AT_WARMUP = tl.constexpr(0)  # header, int64
AT_INTERVAL = tl.constexpr(1)  # between resets beyond the table; 0: none
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
AT_WEIGHT_DECAY = tl.constexpr(5)
AT_DECOUPLED = tl.constexpr(6)
AT_SIGN = tl.constexpr(7)

# The coefficients of each group: float64, on a cache line of its own.
COEFFICIENTS = tl.constexpr(16)
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
SKIP = tl.constexpr(3)  # an overflow was found: nothing changes

REDUCE = tl.constexpr(8192)  # partial sums added at a time; their number is a multiple of this
SCAN = tl.constexpr(256)  # reset times compared at a time
CHUNK = tl.constexpr(32)  # groups at a time


@triton.jit
def _sum_of(partials, count):
    """Adds in a fixed order, so the bits are the same every time."""
    lanes = tl.arange(0, REDUCE)
    total = tl.zeros((REDUCE,), tl.float64)
    first = tl.full((), 0, tl.int32)
    while first < count:
        total += tl.load(partials + first + lanes)
        first += REDUCE
    return tl.sum(total)


@triton.jit
def _is_reset(t, resets, count, interval):
    """Whether t is in the table, or a whole number of intervals after its end."""
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
def finish_distance_kernel(distance_squared, pending, partials, count):
    if tl.load(pending) != 0:
        total = _sum_of(partials, count)
        tl.debug_barrier()  # all threads have read what is written below
        tl.store(distance_squared, total)
        tl.store(pending, 0)


# Numbers and alignments that change from step to step must not trigger a compilation.
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
    coefficients,
    OFFSETS: tl.constexpr,
):
    skip = tl.full((), 0, tl.int1)
    if found_inf is not None:
        skip = tl.load(found_inf) != 0
    if skip:
        first = tl.full((), 0, tl.int32)
        while first < groups:
            group = first + tl.arange(0, CHUNK)
            tl.store(coefficients + group * COEFFICIENTS + AT_PHASE, SKIP, mask=group < groups)
            first += CHUNK
    else:
        # Loads come first: a load waits for a barrier, not for another load.
        now = tl.load(clock) + 1
        t = tl.maximum(now - tl.load(settings + AT_WARMUP), 0)
        interval = tl.load(settings + AT_INTERVAL)
        times = tl.load(settings + AT_RESETS)
        bounded = tl.load(settings + AT_BOUNDED) != 0
        cubic = tl.load(numbers + AT_CUBIC)
        repulsive = tl.load(numbers + AT_REPULSIVE)
        average = tl.load(numbers + AT_AVERAGE)
        inverse_scale = tl.full((), 1.0, tl.float64)
        if grad_scale is not None:
            inverse_scale = 1.0 / tl.load(grad_scale).to(tl.float64)
        squared = tl.zeros((), tl.float64)
        if OFFSETS:
            squared = tl.load(distance_squared)
            if tl.load(pending) != 0:
                squared = _sum_of(partials, count)

        resetting = _is_reset(t, resets, times, interval)
        warming = t == 0
        iterating = (t > 0) & (resetting == 0)
        phase = tl.where(warming, WARMUP, tl.where(resetting, RESET, ITERATE))
        distance = tl.sqrt(squared)
        cube = distance * squared
        ramp = 1.0 - 1.0 / (1 + t).to(tl.float64)

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

            # β/R³ with R = max(r, r*) needs no cube root: R³ = max(r³, r*³). A NaN distance
            # stays NaN.
            equilibrium = average * lr * repulsive / ((1.0 - average) * (1.0 - momentum))
            reach = tl.where(bounded & (cube < equilibrium), equilibrium, cube)
            repulsion = tl.where(reach == 0, 0.0, repulsive / tl.where(reach == 0, 1.0, reach))
            force = cubic * distance - repulsion

            decoupled = tl.load(numbers + entry + AT_DECOUPLED, mask=known, other=0.0)
            weight_decay = tl.load(numbers + entry + AT_WEIGHT_DECAY, mask=known, other=0.0)
            sign = tl.load(numbers + entry + AT_SIGN, mask=known, other=0.0)
            carry = tl.where(iterating, momentum, 0.0)
            own = coefficients + group * COEFFICIENTS
            tl.store(own + AT_KEEP, tl.where(warming, 1.0, carry), mask=known)
            tl.store(own + AT_GAIN, tl.where(warming, 0.0, lr), mask=known)
            tl.store(own + AT_CARRY, carry, mask=known)
            tl.store(own + AT_PUSH, tl.where(resetting, 0.0, lr), mask=known)
            tl.store(own + AT_SHRINK, tl.where(resetting, 0.0, lr * decoupled), mask=known)
            tl.store(own + AT_FOLLOW, tl.where(iterating, average, 1.0), mask=known)
            tl.store(own + AT_FORCE, tl.where(iterating, force, 0.0), mask=known)
            tl.store(own + AT_DECAY, weight_decay, mask=known)
            tl.store(own + AT_SCALE, sign * inverse_scale, mask=known)
            tl.store(own + AT_PHASE, phase, mask=known)
            first += CHUNK

        tl.debug_barrier()  # all threads have read what is written below
        tl.store(clock, now)
        if OFFSETS:
            tl.store(distance_squared, squared)
            tl.store(pending, 1)
