"""The update on a CPU as machine code: numba functions for `address_table`.

The equations are those of :mod:`neumann.optim.update`, followed by the sum of the new δ².

A coefficient of zero and a factor of one arrive as None. Numba compiles one specialization for each
combination of dtypes and absent terms, about a second each. An absent term costs nothing and is
never multiplied by zero, and the loop has no branches, so it vectorizes. The sum of squares is a
loop of its own over the same block, which is still in the cache, because only that loop may be
reordered.

Memory comes as addresses. numba does not know bfloat16: it comes as uint16, and is widened and
rounded here. Nothing checks an address. A wrong table corrupts memory; building a correct one is
the job of `numba_pass`.

Machine code is cached beside this file, in the user's cache directory where that is not writable,
or where NUMBA_CACHE_DIR says; if none can be written, each process compiles. The cache depends on
this file alone, so every compiled function lives here.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar, cast

import numpy as np

numba: Any = import_module("numba")  # its type hints are of no use here
types, carray = numba.types, numba.carray

BLOCK = 8192  # elements updated and then squared at a time: they fit the caches
CHUNK = 16  # blocks a thread takes at a time

_Function = TypeVar("_Function", bound=Callable[..., Any])
_CONTRACT = {"contract"}  # a·b + c may be rounded once; NaN, infinity and the order are kept
_REORDER = {"contract", "reassoc"}  # for sums: the compiler chooses the order, once


def compiled(**options: Any) -> Callable[[_Function], _Function]:
    """numba.njit with types, and without a cache if no directory for one is writable."""

    def decorate(function: _Function) -> _Function:
        try:
            result = numba.njit(**options)(function)
        except RuntimeError:
            result = numba.njit(**{**options, "cache": False})(function)
        return cast(_Function, result)

    return decorate


def intrinsic(build: Callable[..., Any]) -> Callable[..., Any]:
    """A function for compiled code, defined by a signature and the instructions to emit."""
    return cast(Callable[..., Any], numba.extending.intrinsic(build))


def chosen_by_type(choose: _Function) -> _Function:
    """A function for compiled code whose body `choose` picks by the types of the arguments.

    Unlike an `if x is None` in the body, this compiles nothing for the branches not taken.
    """

    def stand_in(*arguments: Any) -> Any:
        raise NotImplementedError(f"{choose.__name__} exists in compiled code only")

    numba.extending.overload(stand_in, strict=False, jit_options={"fastmath": _CONTRACT})(choose)
    return cast(_Function, stand_in)


def _absent(*kinds: Any) -> bool:
    """Whether one of the types is NoneType."""
    return any(isinstance(kind, types.NoneType) for kind in kinds)


# ------------------------------------------------------------------ memory


@intrinsic
def _pointer(context: Any, address: Any, sample: Any) -> Any:
    """The address as a pointer to elements of the sample's dtype."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(sample.dtype)(types.int64, sample), generate


@intrinsic
def _take_number(context: Any, counter: Any) -> Any:
    """counter[0]++, atomic between threads: the value before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        one = context.get_constant(types.int64, 1)
        return builder.atomic_rmw("add", data, one, "monotonic")

    return types.int64(counter), generate


@chosen_by_type
def _elements(address: Any, start: Any, size: Any, sample: Any) -> Any:
    """`size` elements of the tensor at the address, from `start` on; None without a sample."""
    if _absent(sample):
        return lambda address, start, size, sample: None
    return lambda address, start, size, sample: carray(
        _pointer(address + start * sample.itemsize, sample), size
    )


@chosen_by_type
def _read(array: Any, index: Any) -> Any:
    """array[index] as a number; None without an array."""
    if _absent(array):
        return lambda array, index: None
    if array.dtype == types.uint16:
        return lambda array, index: _widen(array[index])
    return lambda array, index: array[index]


@chosen_by_type
def _write(array: Any, index: Any, number: Any, random: Any) -> Any:
    """array[index] = number, rounded; writes nothing without an array or a number."""

    def write(array: Any, index: int, number: Any, random: Any) -> None:
        array[index] = number

    def write_rounded(array: Any, index: int, number: Any, random: Any) -> None:
        array[index] = _round(np.float32(number), random)

    if _absent(array, number):
        return lambda array, index, number, random: None
    return write_rounded if array.dtype == types.uint16 else write


# ------------------------------------------------------------------ bfloat16


@intrinsic
def _bits_of(context: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), generate


@intrinsic
def _number_of(context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), generate


@compiled()
def _widen(bits: Any) -> Any:
    return _number_of(np.uint32(np.uint32(bits) << np.uint32(16)))


@compiled()
def _round(number: Any, random: Any) -> Any:
    """float32 to bfloat16: add to the lower half of the bits, then cut it off."""
    bits = _bits_of(number)
    upper = np.uint32(bits >> np.uint32(16))
    if number != number:
        return np.uint16(upper | np.uint32(0x40))  # an addition could turn NaN into zero
    return np.uint16(np.uint32(bits + _rounding(upper, random)) >> np.uint32(16))


@chosen_by_type
def _rounding(upper: Any, random: Any) -> Any:
    """What to add: just under half a unit, or half if the last bit kept is odd, rounds to nearest
    even; 16 random bits round up as often as the lower half says."""
    if _absent(random):
        return lambda upper, random: np.uint32(np.uint32(0x7FFF) + (upper & np.uint32(1)))
    return lambda upper, random: random


# ------------------------------------------------------------------ randomness


@chosen_by_type
def _block_key(seed: Any, position: Any) -> Any:
    """64 random bits for the block at a position, by the finalizer of SplitMix64."""

    def key_of(seed: Any, position: Any) -> Any:
        key = seed + np.uint64(position) * np.uint64(0x9E3779B97F4A7C15)
        key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return key ^ (key >> np.uint64(31))

    return (lambda seed, position: None) if _absent(seed) else key_of


@intrinsic
def _scramble(context: Any, bits: Any, shift: Any, factor: Any) -> Any:
    """(bits ^ bits >> shift)·factor in 32 bits; numba would use 64, which do not vectorize."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits, shift, factor = arguments
        return builder.mul(builder.xor(bits, builder.lshr(bits, shift)), factor)

    return types.uint32(types.uint32, types.uint32, types.uint32), generate


@chosen_by_type
def _element_bits(key: Any, index: Any) -> Any:
    """32 random bits for an element of the block, with the halves of the key mixed in."""

    def bits_of(key: Any, index: Any) -> Any:
        bits = np.uint32(np.uint32(index) ^ np.uint32(key))
        bits = _scramble(bits, np.uint32(16), np.uint32(0x7FEB352D))
        bits = np.uint32(bits + np.uint32(key >> np.uint64(32)))
        bits = _scramble(bits, np.uint32(15), np.uint32(0x846CA68B))
        return _scramble(bits, np.uint32(16), np.uint32(1))

    return (lambda key, index: None) if _absent(key) else bits_of


@chosen_by_type
def _half(bits: Any, shift: Any) -> Any:
    """The 16 bits from `shift` on."""
    if _absent(bits):
        return lambda bits, shift: None
    return lambda bits, shift: np.uint32((bits >> np.uint32(shift)) & np.uint32(0xFFFF))


# ------------------------------------------------------------------ arithmetic


@chosen_by_type
def _add_product(total: Any, coefficient: Any, number: Any) -> Any:
    """total + coefficient·number; either of the terms may be absent."""
    if _absent(coefficient):
        return lambda total, coefficient, number: total
    if _absent(total):
        return lambda total, coefficient, number: coefficient * number
    return lambda total, coefficient, number: total + coefficient * number


@chosen_by_type
def _scale(factor: Any, number: Any) -> Any:
    """factor·number; a factor of one is absent."""
    if _absent(factor):
        return lambda factor, number: number
    return lambda factor, number: factor * number


@chosen_by_type
def _move(number: Any, step: Any) -> Any:
    """number + step; None (nothing to write) if one of them is absent."""
    if _absent(number, step):
        return lambda number, step: None
    return lambda number, step: number + step


@chosen_by_type
def _follow(follow: Any, offset: Any, step: Any) -> Any:
    """h·(δ + step); None (nothing to write) if that is δ."""
    if _absent(follow):
        return lambda follow, offset, step: _move(offset, step)
    if _absent(step):
        return lambda follow, offset, step: follow * offset
    return lambda follow, offset, step: follow * (offset + step)


@chosen_by_type
def _or_zero(number: Any) -> Any:
    return (lambda number: np.float32(0)) if _absent(number) else lambda number: number


@compiled(fastmath=_CONTRACT)
def _update(w: Any, g: Any, m: Any, offset: Any, terms: Any, key: Any) -> None:
    """Update a block."""
    scale, weight_decay, force, keep, gain, carry, push, shrink, follow = terms
    for i in range(w.size):
        w_old, offset_old = _read(w, i), _read(offset, i)
        d = _add_product(
            _add_product(_scale(scale, _read(g, i)), weight_decay, w_old), force, offset_old
        )
        m_new = _add_product(_add_product(None, keep, _read(m, i)), gain, d)
        s = _add_product(_add_product(_add_product(None, carry, m_new), push, d), shrink, w_old)
        random = _element_bits(key, i)
        _write(m, i, _or_zero(m_new), _half(random, 0))
        _write(w, i, _move(w_old, s), None)
        _write(offset, i, _follow(follow, offset_old, s), _half(random, 16))


@compiled(fastmath=_REORDER)
def _sum_of_squares(array: Any) -> float:
    total = 0.0
    for i in range(array.size):
        number = np.float64(_read(array, i))
        total += number * number
    return total


@chosen_by_type
def _distance(offset: Any) -> Any:
    """Σδ², in float64; 0 if δ is not kept."""
    return (lambda offset: 0.0) if _absent(offset) else lambda offset: _sum_of_squares(offset)


@compiled(nogil=True, cache=True)
def run(
    counter: Any,
    addresses: Any,
    sizes: Any,
    positions: Any,
    owners: Any,
    starts: Any,
    squares: Any,
    samples: Any,
    terms: Any,
    seed: Any,
) -> None:
    """Update chunks of blocks until the counter, which all threads share, has passed them all.

    Args:
        counter: the number of chunks taken so far.
        addresses: of w, g, m and δ (rows) of each tensor (columns).
        sizes: the number of elements of each tensor.
        positions: of the first element of each tensor, for random numbers.
        owners: the tensor of each block.
        starts: the first element of each block.
        squares: receives the sum of the new δ² of each block.
        samples: empty arrays of the dtypes of w, g, m and δ; m's is None if m is left alone, δ's if
            it is not kept.
        terms: the coefficients, in the order of `_update`; gain, push and shrink with a minus sign.
        seed: of stochastic rounding, or None.
    """
    w_sample, g_sample, m_sample, offset_sample = samples
    while True:
        first = _take_number(counter) * CHUNK
        if first >= owners.size:
            return
        for block in range(first, min(first + CHUNK, owners.size)):
            tensor, start = owners[block], starts[block]
            size = min(BLOCK, sizes[tensor] - start)
            offset = _elements(addresses[3, tensor], start, size, offset_sample)
            _update(
                _elements(addresses[0, tensor], start, size, w_sample),
                _elements(addresses[1, tensor], start, size, g_sample),
                _elements(addresses[2, tensor], start, size, m_sample),
                offset,
                terms,
                _block_key(seed, positions[tensor] + start),
            )
            squares[block] = _distance(offset)


def stop_caching() -> None:
    """Compile for this process alone from now on."""
    cast(Any, run)._cache.disable()
