"""The update for a tracer: what `update` does, with coefficients that are tensors.

    d = ±g/grad_scale + λ·w + c·δ
    m ← a·m − e·d
    s = b·m − f·d − z·w
    w ← w + s
    δ ← h·(δ + s)

The row (a e b f z h c λ ±1/grad_scale) comes from `traced`. A coefficient of zero drops its term,
as in `update`; which it is, only the graph knows when it runs. Arithmetic is in float32 or wider.
bfloat16 state is rounded with noise hashed from clock, tensor and element, with the bits that
`kernels.cuda_kernels` has: no random state enters the graph.

Sums and writes are over lists of all tensors, which a compiler takes together into few kernels;
tensor by tensor it would make a kernel of each.

How it fails: not by itself. What a compiler cannot take it names.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neumann.optim.execution import Work
from neumann.optim.update import as_real, rounded, wide_dtype


class Row(NamedTuple):
    """A group's coefficients, 0-d tensors; the letters are those of the module's equations."""

    keep: Tensor  # a
    gain: Tensor  # e
    carry: Tensor  # b
    push: Tensor  # f
    shrink: Tensor  # z
    follow: Tensor  # h
    force: Tensor  # c
    decay: Tensor  # λ
    scale: Tensor  # ±1/grad_scale


class _Tensors(NamedTuple):
    """One parameter that has a gradient: its tensors as reals, and what its group does to them."""

    weight: Tensor
    gradient: Tensor
    iterate: Tensor
    offset: Tensor | None  # None: without forces it is not kept
    row: Row  # on the tensors' device, and wide
    wide: torch.dtype  # of the arithmetic
    options: Mapping[str, Any]
    number: int  # over all groups, so that no two tensors have the same noise


def update(
    works: Sequence[Work], rows: Tensor, now: Tensor, resetting: Tensor, scaled: bool
) -> None:
    """All groups at once, as lists: first every new value, then the writing."""
    moving, resting = _divided(works, rows)
    if resting:  # left alone, but their m is reset and their δ counts in r
        torch._foreach_copy_(
            resting,
            [torch.where(resetting.to(m.device), torch.zeros_like(m), m) for m in resting],
        )
    if not moving:
        return
    weights = [x.weight.to(x.wide) for x in moving]
    d = [_gradient(x, scaled) for x in moving]
    kept = [x.offset for x in moving if x.offset is not None]  # all or none
    offsets = [x.offset.to(x.wide) for x in moving if x.offset is not None]
    if offsets:
        pulls = [_term(x.row.force, offset) for x, offset in zip(moving, offsets, strict=True)]
        d = list(torch._foreach_add(d, pulls))
    m = list(
        torch._foreach_sub(
            [_term(x.row.keep, x.iterate.to(x.wide)) for x in moving],
            [_term(x.row.gain, direction) for x, direction in zip(moving, d, strict=True)],
        )
    )
    s = list(
        torch._foreach_sub(
            [_term(x.row.carry, iterate) for x, iterate in zip(moving, m, strict=True)],
            [_term(x.row.push, direction) for x, direction in zip(moving, d, strict=True)],
        )
    )
    if any(decay_of(x.options, True) for x in moving):
        s = list(
            torch._foreach_sub(
                s, [_term(x.row.shrink, w) for x, w in zip(moving, weights, strict=True)]
            )
        )
    noises = [_noise(now, x) for x in moving]
    torch._foreach_copy_([x.weight for x in moving], torch._foreach_add(weights, s))
    stored = [_rounded(value, noise, 0) for value, noise in zip(m, noises, strict=True)]
    torch._foreach_copy_([x.iterate for x in moving], stored)
    if offsets:
        followed = [
            x.row.follow * moved
            for x, moved in zip(moving, torch._foreach_add(offsets, s), strict=True)
        ]
        stored = [_rounded(value, noise, 16) for value, noise in zip(followed, noises, strict=True)]
        torch._foreach_copy_(kept, stored)


def _divided(works: Sequence[Work], rows: Tensor) -> tuple[list[_Tensors], list[Tensor]]:
    """The parameters that have a gradient, and the iterates of those that have none."""
    moving: list[_Tensors] = []
    resting: list[Tensor] = []
    number = 0
    for work, row in zip(works, rows.unbind(), strict=True):
        cast: dict[tuple[torch.device, torch.dtype], Row] = {}
        offsets = [None] * len(work.weights) if work.offsets is None else work.offsets
        for w, g, m, offset in zip(
            work.weights, work.gradients, work.iterates, offsets, strict=True
        ):
            if g is None:
                resting.append(m)
            else:
                wide = wide_dtype(torch.promote_types(as_real(w).dtype, as_real(m).dtype))
                if (w.device, wide) not in cast:
                    cast[w.device, wide] = Row(*row.to(w.device, wide).unbind())
                reals = as_real(w), as_real(g), as_real(m)
                real = None if offset is None else as_real(offset)
                here = cast[w.device, wide]
                moving.append(_Tensors(*reals, real, here, wide, work.options, number))
            number += 1
    return moving, resting


def _gradient(x: _Tensors, scaled: bool) -> Tensor:
    """±g/grad_scale + λ·w"""
    gradient = x.gradient.to(x.wide)
    if scaled or x.options["maximize"]:
        gradient = x.row.scale * gradient
    if decay_of(x.options, False):
        gradient = gradient + x.row.decay * x.weight.to(x.wide)
    return gradient


def distance_squared(offsets: Sequence[Tensor], like: Tensor) -> Tensor:
    """r² = Σ‖δ‖², as in `distance`; added one by one, as stacking would be a kernel for each."""
    total = torch.zeros_like(like)
    real = [as_real(offset) for offset in offsets if offset.numel()]
    for dtype in dict.fromkeys([offset.dtype for offset in real]):
        norms = torch._foreach_norm(
            [offset for offset in real if offset.dtype == dtype], 2, dtype=wide_dtype(dtype)
        )
        for norm in norms:
            total = total + norm.to(total).square()
    return total


def decay_of(options: Mapping[str, Any], decoupled: bool) -> Any:
    """λ if the group's weight decay is of this kind, else 0."""
    return options["weight_decay"] if options["decoupled_weight_decay"] is decoupled else 0.0


def _term(coefficient: Tensor, values: Tensor) -> Tensor:
    """Their product, and zero where the coefficient is zero, whatever the values."""
    return coefficient * torch.where(coefficient != 0, values, 0.0)


def _noise(now: Tensor, x: _Tensors) -> Tensor | None:
    """32 bits for each element, in int64, the same for the same step, tensor and element.

    None where the state is not rounded by chance.
    """
    if x.iterate.dtype != torch.bfloat16 or x.wide != torch.float32:
        return None
    now = now.to(x.weight.device)
    key = _mixed(now & 0xFFFFFFFF)
    key = _mixed(key ^ (now >> 32))
    key = _mixed(_mixed(key ^ x.number))
    elements = torch.arange(x.weight.numel(), device=now.device).reshape(x.weight.shape)
    return _mixed(key ^ (elements & 0xFFFFFFFF))


def _rounded(value: Tensor, noise: Tensor | None, first: int) -> Tensor:
    """Rounded with 16 bits of the noise."""
    return value if noise is None else rounded(value, (noise >> first) & 0xFFFF)


def _mixed(bits: Tensor) -> Tensor:
    """A hash of 32 bits to 32 bits; the second factor is 0x846CA68B − 2³², to stay in int64."""
    bits = bits ^ (bits >> 16)
    bits = (bits * 0x7FEB352D) & 0xFFFFFFFF
    bits = bits ^ (bits >> 15)
    bits = (bits * (0x846CA68B - (1 << 32))) & 0xFFFFFFFF
    return bits ^ (bits >> 16)
