"""The dtypes of the arithmetic, and rounding.

All arithmetic is in float32 or wider: half-precision tensors are widened, updated, and rounded back
once. Complex tensors are seen as pairs of reals, in the same memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from neumann.optim.phases import Coefficients
from neumann.optim.tensors import Tensors
from neumann.optim.update import Update


def prepare_update(
    tensors: Tensors, coefficients: Coefficients, update: Update, seed: int = 0
) -> Callable[[], float]:
    """Prepare `update` for tensors of any device and dtype; returns a function that runs it.

    That function returns 0.0, because it sums no squares. Complex tensors become pairs of reals.
    The caller's gradients are never changed. `seed` is for rounding bfloat16 state, and has to
    change from step to step.
    """
    buckets = _make_buckets(tensors)

    def run() -> float:
        for own, wide in buckets:
            update(wide, coefficients)
            if own.weights is not wide.weights:
                for mine, widened in zip(own.weights, wide.weights, strict=True):
                    mine.copy_(widened)
            noise = torch.Generator(wide.weights[0].device).manual_seed(seed)
            for kept, computed in ((own.iterates, wide.iterates), (own.offsets, wide.offsets)):
                if kept is not None and computed is not None and kept is not computed:
                    for mine, widened in zip(kept, computed, strict=True):
                        _store(mine, widened, noise)
        return 0.0

    return run


def _make_buckets(tensors: Tensors) -> list[tuple[Tensors, Tensors]]:
    """Per device and dtypes: the tensors as reals, and the same widened for the arithmetic."""
    buckets: dict[tuple[Any, ...], Tensors] = {}
    for w, g, m, offset in tensors:
        key = (w.device, w.dtype, m.dtype)
        bucket = buckets.setdefault(key, Tensors(offsets=None if offset is None else []))
        bucket.weights.append(as_real(w))
        bucket.gradients.append(as_real(g))
        bucket.iterates.append(as_real(m))
        if bucket.offsets is not None and offset is not None:
            bucket.offsets.append(as_real(offset))
    return [(bucket, _widen(bucket)) for bucket in buckets.values()]


def _widen(bucket: Tensors) -> Tensors:
    wide = wide_dtype(torch.promote_types(bucket.weights[0].dtype, bucket.iterates[0].dtype))

    def widen(tensors: list[Any]) -> list[Any]:
        if all(tensor.dtype == wide for tensor in tensors):
            return tensors
        return [tensor.to(wide) for tensor in tensors]

    return Tensors(
        widen(bucket.weights),
        widen(bucket.gradients),
        widen(bucket.iterates),
        None if bucket.offsets is None else widen(bucket.offsets),
    )


def _store(state: Tensor, value: Tensor, noise: torch.Generator) -> None:
    """Round `value` into `state`, stochastically if that is bfloat16.

    δ shrinks by 1 % a step, which is about one unit in the last place of bfloat16. Rounded to
    nearest it would stop short of its target; rounded up or down at random it is right on average.
    """
    if state.dtype != torch.bfloat16 or value.dtype != torch.float32 or value.requires_grad:
        state.copy_(value)
        return
    low = torch.randint(
        1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=noise
    )
    state.copy_(round_stochastically(value, low))


def round_stochastically(value: Tensor, noise: Tensor) -> Tensor:
    """float32 values that bfloat16 can hold, rounded up or down by 16 bits of noise each."""
    bits = (value.contiguous().view(torch.int32) + noise.to(torch.int32)) & -(1 << 16)
    # Adding to the bits of infinity or NaN would turn them into other numbers.
    return torch.where(torch.isfinite(value), bits.view(torch.float32), value)


def mix_bits(bits: Tensor) -> Tensor:
    """A hash from 32 bits to 32 bits; the second factor is 0x846CA68B − 2³², to stay in int64."""
    bits = bits ^ (bits >> 16)
    bits = (bits * 0x7FEB352D) & 0xFFFFFFFF
    bits = bits ^ (bits >> 15)
    bits = (bits * (0x846CA68B - (1 << 32))) & 0xFFFFFFFF
    return bits ^ (bits >> 16)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def as_real(tensor: Any) -> Any:
    """A complex tensor as pairs of reals, in the same memory."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
