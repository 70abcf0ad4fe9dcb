"""The one update, written twice: for reading (per tensor) and for speed (foreach).

    d  = g + c·δ
    m  ← a·m − e·d
    s  = b·m − f·d − z·w
    w  ← w + s
    δ  ← h·(δ + s)

The row (a, e, b, f, z, h) comes from `phases`, the force c from `distance`; g is the gradient after
L2 weight decay. A coefficient of zero drops its term instead of multiplying by it, so that a NaN in
an old iterate does not survive a reset, and a reset moves no weight whose gradient overflowed.

Lists are aligned, one entry a parameter. All arithmetic happens in float32 or wider: half-precision
tensors are widened, updated and rounded back once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from neumann.optim.phases import Row


@dataclass(frozen=True)
class Tensors:
    """What a step works on: w, g, m and δ of each parameter. Without forces δ is not kept."""

    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    iterates: list[Tensor] = field(default_factory=list)
    offsets: list[Tensor] | None = None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        offsets = self.offsets if self.offsets is not None else [None] * len(self.weights)
        return zip(self.weights, self.gradients, self.iterates, offsets, strict=True)


Update = Callable[[Tensors, Row, Tensor | None], None]


def update_single(tensors: Tensors, row: Row, force: Tensor | None) -> None:
    """The update for reading; the only form that autograd can look through."""
    for w, g, m, offset in tensors:
        w_old, m_old, offset_old = _kept(w), _kept(m), _kept(offset)
        d = g
        if force is not None and offset_old is not None:
            d = g + force.to(g.dtype) * offset_old
        m_new = _combine((row.keep, m_old), (-row.gain, d))
        s = _combine((row.carry, m_new), (-row.push, d), (-row.decay, w_old))
        m.copy_(m_new)
        w.add_(s)
        if offset is not None and offset_old is not None:
            offset.copy_(row.follow * (offset_old + s))


def update_foreach(tensors: Tensors, row: Row, force: Tensor | None) -> None:
    """The same for lists on one device and of one dtype, in as few launches as torch offers."""
    w, m, offset = tensors.weights, tensors.iterates, tensors.offsets
    d = tensors.gradients
    if force is not None and offset is not None:
        d = list(torch._foreach_mul(offset, force.to(d[0])))
        torch._foreach_add_(d, tensors.gradients)

    if _is_zero(row.keep):
        torch._foreach_zero_(m)
    elif _is_not_one(row.keep):
        torch._foreach_mul_(m, row.keep)
    if not _is_zero(row.gain):
        torch._foreach_add_(m, d, alpha=-row.gain)

    s = None
    if not _is_zero(row.carry):
        s = list(torch._foreach_mul(m, row.carry))
    for coefficient, source in ((row.push, d), (row.decay, w)):
        if _is_zero(coefficient):
            continue
        if s is None:
            s = list(torch._foreach_mul(source, -coefficient))
        else:
            torch._foreach_add_(s, source, alpha=-coefficient)
    if s is not None:
        torch._foreach_add_(w, s)
        if offset is not None:
            torch._foreach_add_(offset, s)
    if offset is not None and _is_not_one(row.follow):
        torch._foreach_mul_(offset, row.follow)


def apply(
    tensors: Tensors,
    row: Row,
    force: Tensor | None,
    update: Update,
    *,
    weight_decay: float = 0.0,
    maximize: bool = False,
    seed: int = 0,
) -> None:
    """Run `update` on the tensors, sorted by device and dtype, complex ones as pairs of reals.

    The gradients are negated for `maximize` and decayed first; the caller's are never changed.
    `seed` is for the rounding of bfloat16 state, and has to differ from step to step.
    """
    for own, wide in _buckets(tensors):
        gradients = decayed_gradients(wide.gradients, wide.weights, weight_decay, maximize)
        here = None if force is None else force.to(wide.weights[0].device)
        update(replace(wide, gradients=gradients), row, here)
        if own.weights is not wide.weights:
            for mine, widened in zip(own.weights, wide.weights, strict=True):
                mine.copy_(widened)
        noise = torch.Generator(wide.weights[0].device).manual_seed(seed)
        for kept, computed in ((own.iterates, wide.iterates), (own.offsets, wide.offsets)):
            if kept is not None and computed is not None and kept is not computed:
                for mine, widened in zip(kept, computed, strict=True):
                    _store(mine, widened, noise)


def _store(state: Tensor, value: Tensor, noise: torch.Generator) -> None:
    """Round `value` into `state`; into bfloat16 stochastically.

    δ shrinks by 1 % a step, which is about one unit in bfloat16's last place: rounded to nearest it
    would stop short of where it belongs. Up or down by chance, in proportion, is right on average.
    """
    if state.dtype != torch.bfloat16 or value.dtype != torch.float32 or value.requires_grad:
        state.copy_(value)
        return
    low = torch.randint(
        1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=noise
    )
    state.copy_(rounded(value, low))


def rounded(value: Tensor, noise: Tensor) -> Tensor:
    """float32 numbers that bfloat16 has, up or down by chance; `noise` is 16 bits for each."""
    bits = (value.contiguous().view(torch.int32) + noise.to(torch.int32)) & -(1 << 16)
    # Adding to the bits of infinity or NaN would make another number of them.
    return torch.where(torch.isfinite(value), bits.view(torch.float32), value)


def decayed_gradients(
    gradients: list[Tensor], weights: list[Tensor], weight_decay: float, maximize: bool
) -> list[Tensor]:
    """±g + λw: the gradient with L2 weight decay, at the displaced weights."""
    if maximize:
        gradients = list(torch._foreach_neg(gradients))
    if weight_decay == 0:
        return gradients
    if torch.is_grad_enabled():  # autograd would hold on to what foreach reads
        return [g + weight_decay * w for g, w in zip(gradients, weights, strict=True)]
    return list(torch._foreach_add(gradients, weights, alpha=weight_decay))


def nonfinite(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
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


def evaluation_weights(weight: Tensor, iterate: Tensor, momentum: Any) -> Tensor:
    """w − μm: the weights to evaluate and to ship, as a new tensor of the weights' dtype."""
    wide = wide_dtype(torch.promote_types(weight.dtype, iterate.dtype))
    result: Tensor = weight.to(wide) - momentum * iterate.to(wide)
    return result.to(weight.dtype)


def _kept(tensor: Any) -> Any:
    """What autograd will ask for again must not be the tensor that is about to be written."""
    return tensor.clone() if torch.is_grad_enabled() and tensor is not None else tensor


def _combine(*terms: tuple[Any, Tensor]) -> Tensor:
    """Σ coefficient·tensor over the terms whose coefficient is not zero."""
    products: list[Tensor] = [
        coefficient * tensor for coefficient, tensor in terms if not _is_zero(coefficient)
    ]
    if not products:
        return torch.zeros_like(terms[0][1])
    total = products[0]
    for product in products[1:]:
        total = total + product
    return total


def _is_zero(coefficient: Any) -> bool:
    """Zero as a number. A tensor is data, which control flow must not read."""
    return not isinstance(coefficient, Tensor) and coefficient == 0


def _is_not_one(coefficient: Any) -> bool:
    return isinstance(coefficient, Tensor) or coefficient != 1


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def _buckets(tensors: Tensors) -> list[tuple[Tensors, Tensors]]:
    """Per device and dtypes: the parameters' own tensors as reals, and the same made wide."""
    buckets: dict[tuple[Any, ...], Tensors] = {}
    for w, g, m, offset in tensors:
        key = (w.device, w.dtype, m.dtype)
        bucket = buckets.setdefault(key, Tensors(offsets=None if offset is None else []))
        bucket.weights.append(as_real(w))
        bucket.gradients.append(as_real(g))
        bucket.iterates.append(as_real(m))
        if bucket.offsets is not None and offset is not None:
            bucket.offsets.append(as_real(offset))
    return [(bucket, _widened(bucket)) for bucket in buckets.values()]


def _widened(bucket: Tensors) -> Tensors:
    wide = wide_dtype(torch.promote_types(bucket.weights[0].dtype, bucket.iterates[0].dtype))

    def widen(tensors: list[Tensor]) -> list[Tensor]:
        if all(tensor.dtype == wide for tensor in tensors):
            return tensors
        return [tensor.to(wide) for tensor in tensors]

    return Tensors(
        widen(bucket.weights),
        widen(bucket.gradients),
        widen(bucket.iterates),
        None if bucket.offsets is None else widen(bucket.offsets),
    )


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of reals, in the same memory."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
