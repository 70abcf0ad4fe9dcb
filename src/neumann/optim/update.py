"""The update: one set of equations for all phases, and the form of it that is for reading.

    d  = s·g + λ·w + c·δ        δ = w − v, the offset from the moving average
    m  ← a·m − e·d
    Δ  = b·m − f·d − z·w
    w  ← w + Δ
    δ  ← h·(δ + Δ)

The row (a, e, b, f, z, h, c, λ, s) comes from :mod:`neumann.optim.phases`. λ is L2 weight decay, z
decoupled weight decay, c the force of :mod:`neumann.optim.distance`, s = ±1/grad_scale. A
coefficient of zero drops its term instead of multiplying by it. So a NaN in an old iterate does not
survive a reset, and a reset moves no weight whose gradient overflowed.

The equations exist in four forms: `update_single` here, lists (`backends/lists.py`), numba
(`backends/cpu/numba_kernel.py`) and Triton (`backends/cuda/update_kernel.py`). All arithmetic is in
float32 or wider: half-precision tensors are widened, updated, and rounded back once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from neumann.optim.phases import Row

if TYPE_CHECKING:
    from neumann.optim.options import GroupOptions


@dataclass(frozen=True)
class Tensors:
    """One group's share of a step: aligned lists with an entry for each parameter.

    The same container travels from the parameter groups through the preconditioner to the kernel.
    """

    weights: list[Tensor] = field(default_factory=list)  # w: what this process holds of it
    gradients: list[Tensor | None] = field(default_factory=list)  # g, or P(g)
    iterates: list[Tensor] = field(default_factory=list)  # m
    offsets: list[Tensor] | None = None  # δ; None: without forces it is not kept
    parameters: list[Tensor] = field(default_factory=list)  # in the user's groups
    states: list[dict[str, Any]] = field(default_factory=list)  # of these parameters
    options: "GroupOptions" = None  # type: ignore[assignment]  # a step always has them
    momentum: Tensor = None  # type: ignore[assignment]  # receives μ of the step
    part: int = 0  # which sum of squares these offsets go into: see `distributed`

    def replace_gradients(self, gradients: list[Tensor | None], options: Any = None) -> "Tensors":
        """The same tensors with other gradients and, if given, other options."""
        # Spelled out, because torch 2.6 cannot trace dataclasses.replace.
        return Tensors(
            self.weights,
            gradients,
            self.iterates,
            self.offsets,
            self.parameters,
            self.states,
            self.options if options is None else options,
            self.momentum,
            self.part,
        )

    def select(self, chosen: Sequence[bool], part: int | None = None) -> "Tensors":
        """The entries where `chosen` is true."""
        return Tensors(
            list(compress(self.weights, chosen)),
            list(compress(self.gradients, chosen)),
            list(compress(self.iterates, chosen)),
            None if self.offsets is None else list(compress(self.offsets, chosen)),
            list(compress(self.parameters, chosen)),
            list(compress(self.states, chosen)),
            self.options,
            self.momentum,
            self.part if part is None else part,
        )

    def with_gradient(self) -> "Tensors":
        """The parameters that have a gradient."""
        if all(g is not None for g in self.gradients):
            return self
        return self.select([g is not None for g in self.gradients])

    def without_gradient(self) -> "Tensors":
        """The parameters that have none: they stay put, but m is reset and δ counts in r."""
        return self.select([g is None for g in self.gradients])

    def __iter__(self) -> Iterator[tuple[Tensor, Any, Tensor, Tensor | None]]:
        """w, g, m and δ of each parameter."""
        offsets = self.offsets if self.offsets is not None else [None] * len(self.weights)
        return zip(self.weights, self.gradients, self.iterates, offsets, strict=True)


Update = Callable[[Tensors, Row], None]


def update_single(tensors: Tensors, row: Row) -> None:
    """The update for reading, one tensor at a time; the only form that autograd can record."""
    for w, g, m, offset in tensors:
        w_old, m_old, offset_old = _snapshot(w), _snapshot(m), _snapshot(offset)
        d = g if is_one(row.scale) else row.scale * g
        if not is_zero(row.weight_decay):
            d = torch.add(d, w_old, alpha=row.weight_decay)
        if offset_old is not None and not is_zero(row.force):
            d = d + cast_to(d, row.force) * offset_old
        m_new = _combine((row.keep, m_old), (-row.gain, d))
        change = _combine((row.carry, m_new), (-row.push, d), (-row.shrink, w_old))
        m.copy_(m_new)
        w.add_(change)
        if offset is not None and offset_old is not None:
            offset.copy_(row.follow * (offset_old + change))


def _snapshot(tensor: Any) -> Any:
    """A copy where autograd will need the old values: the tensor itself is about to change."""
    return tensor.clone() if torch.is_grad_enabled() and tensor is not None else tensor


def _combine(*terms: tuple[Any, Tensor]) -> Tensor:
    """Σ coefficient·tensor over the terms whose coefficient is not zero."""
    products = [coefficient * tensor for coefficient, tensor in terms if not is_zero(coefficient)]
    if not products:
        return torch.zeros_like(terms[0][1])
    total: Tensor = products[0]
    for product in products[1:]:
        total = total + product
    return total


def is_zero(coefficient: Any) -> bool:
    """Whether a coefficient is the number 0. A tensor is data, which control flow must not read."""
    return isinstance(coefficient, (int, float)) and coefficient == 0


def is_one(coefficient: Any) -> bool:
    """Whether a coefficient is the number 1."""
    return isinstance(coefficient, (int, float)) and coefficient == 1


def cast_to(like: Tensor, coefficient: Any) -> Any:
    """A tensor coefficient with the dtype and device of `like`; numbers stay as they are."""
    return coefficient.to(like) if isinstance(coefficient, Tensor) else coefficient


# ------------------------------------------------------------------ precision and storage


def apply_update(tensors: Tensors, row: Row, update: Update, seed: int = 0) -> None:
    """Run `update` on tensors of any device and dtype; complex tensors become pairs of reals.

    The caller's gradients are never changed. `seed` is for rounding bfloat16 state, and has to
    change from step to step.
    """
    for own, wide in _buckets(tensors):
        update(wide, row)
        if own.weights is not wide.weights:
            for mine, widened in zip(own.weights, wide.weights, strict=True):
                mine.copy_(widened)
        noise = torch.Generator(wide.weights[0].device).manual_seed(seed)
        for kept, computed in ((own.iterates, wide.iterates), (own.offsets, wide.offsets)):
            if kept is not None and computed is not None and kept is not computed:
                for mine, widened in zip(kept, computed, strict=True):
                    _store(mine, widened, noise)


def _buckets(tensors: Tensors) -> list[tuple[Tensors, Tensors]]:
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


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def as_real(tensor: Any) -> Any:
    """A complex tensor as pairs of reals, in the same memory."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


# ------------------------------------------------------------------ weights and gradients


def evaluation_weights(weight: Tensor, iterate: Tensor, momentum: Any) -> Tensor:
    """w − μm: the weights to evaluate and to ship, as a new tensor of the weights' dtype."""
    wide = wide_dtype(torch.promote_types(weight.dtype, iterate.dtype))
    result: Tensor = weight.to(wide) - momentum * iterate.to(wide)
    return result.to(weight.dtype)


def find_nonfinite(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """1 on `device` if any element of any gradient is inf or NaN, else 0; an int64 scalar."""
    buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            real = as_real(gradient)
            buckets.setdefault((real.device, real.dtype), []).append(real)
    flag = torch.zeros((), dtype=torch.int64, device=device)
    for bucket in buckets.values():
        # The largest magnitude carries inf and NaN and, unlike a sum of squares, cannot overflow.
        peaks = torch.stack(torch._foreach_norm(bucket, torch.inf))
        flag = flag.maximum((~torch.isfinite(peaks)).any().to(device, torch.int64))
    return flag
