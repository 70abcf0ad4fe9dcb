"""The step as a tracer such as torch.compile sees it: one graph for all phases.

A tracer would turn numbers into constants, so clock, t, phase, μ and coefficients are tensors here.
Those of all groups are stacked, so that a compiler stores them instead of computing them again
beside every weight. A step to be skipped gets coefficients that change nothing, and its clock does
not tick.

bfloat16 state is rounded with noise hashed from clock, tensor and element, with the bits that the
Triton kernel has: no random state enters the graph.

What eager steps check is not checked here: values that schedulers change, groups that agree,
weights changed by something else. `tracing.refuse_untraceable` names what cannot be traced.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from neumann.optim.backends.base import Scalars
from neumann.optim.backends.lists import update_lists
from neumann.optim.distance import force, scalar_dtype, take_root
from neumann.optim.options import StepOptions
from neumann.optim.phases import IDLE, Coefficients, TensorPhase, choose_coefficients, momentum_at
from neumann.optim.precision import as_real, mix_bits, round_stochastically, wide_dtype
from neumann.optim.tensors import Tensors


def step_traced(groups: Sequence[Tensors], options: StepOptions, scalars: Scalars) -> None:
    """Tick, and update every group; r² is up to date before and after."""
    clock, squared = scalars.clock, scalars.distance_squared
    device = squared.device
    skip = None
    if scalars.found_inf is not None:
        skip = scalars.found_inf.reshape(()).to(device) != 0
    now = clock.to(device) + 1
    phase, t = options.timetable.place_traced(now)
    coefficients = _compute_coefficients(
        groups, options, phase, t, take_root(squared), scalars.grad_scale
    )
    if skip is not None:
        pairs = zip(IDLE, coefficients, strict=True)
        coefficients = Coefficients(*[torch.where(skip, idle, c) for idle, c in pairs])
        phase = TensorPhase(phase.warming, phase.resetting & ~skip)
    # With a clock on the host and weights elsewhere μ is computed twice, so that nothing waits.
    momenta = _compute_momenta(groups, options.timetable.place_traced(clock + 1)[1])
    for group, momentum in zip(groups, momenta.unbind(), strict=True):
        if skip is not None:
            momentum = torch.where(skip.to(momentum.device), group.momentum, momentum)
        _write(group.momentum, momentum)
    _update(groups, coefficients, now, phase.resetting, scalars.grad_scale is not None)
    if any(group.offsets is not None for group in groups):
        offsets = [offset for group in groups for offset in group.offsets or ()]
        _write(squared, _distance_squared(offsets, squared))
    clock.add_(1 if skip is None else (~skip).to(clock.device, clock.dtype))


def _compute_momenta(groups: Sequence[Tensors], t: Tensor) -> Tensor:
    """μ(t) of each group."""
    t = t.to(scalar_dtype(t.device))
    return torch.as_tensor(momentum_at(t, _stack([g.options["momentum"] for g in groups], t)))


def _compute_coefficients(
    groups: Sequence[Tensors],
    options: StepOptions,
    phase: TensorPhase,
    t: Tensor,
    distance: Tensor,
    grad_scale: Tensor | None,
) -> Coefficients:
    """Each coefficient is a vector with an element for each group."""
    lr = _stack([group.options["lr"] for group in groups], distance)
    momentum = _compute_momenta(groups, t)
    c = torch.zeros_like(lr)
    if options.has_forces:
        c = force(distance, lr, momentum, options).expand_as(lr)
    scale = _stack([-1.0 if group.options["maximize"] else 1.0 for group in groups], distance)
    if grad_scale is not None:
        scale = scale / grad_scale.reshape(()).to(scale)
    return choose_coefficients(
        phase,
        lr,
        momentum,
        options.average * torch.ones_like(lr),
        _stack([_weight_decay(group, decoupled=True) for group in groups], distance),
        force=c,
        weight_decay=_stack([_weight_decay(group, decoupled=False) for group in groups], distance),
        scale=scale,
    )


def _update(
    groups: Sequence[Tensors],
    coefficients: Coefficients,
    now: Tensor,
    resetting: Tensor,
    scaled: bool,
) -> None:
    """Update all groups at once, in few lists, which a compiler turns into few kernels."""
    resting = [m for group in groups for m in group.without_gradient().iterates]
    if resting:
        zeros = [torch.where(resetting.to(m.device), torch.zeros_like(m), m) for m in resting]
        torch._foreach_copy_(resting, zeros)
    own, wide = Tensors(offsets=[]), Tensors(offsets=[])
    chosen: list[Coefficients] = []  # of each tensor, in its dtype
    noises: list[Tensor | None] = []
    number = 0  # over all groups, so that no two tensors have the same noise
    for group, of_group in zip(groups, torch.stack(coefficients, dim=1).unbind(), strict=True):
        cast: dict[tuple[torch.device, torch.dtype], Coefficients] = {}
        for w, g, m, offset in group:
            if g is not None:
                w, g, m = as_real(w), as_real(g), as_real(m)
                dtype = wide_dtype(torch.promote_types(w.dtype, m.dtype))
                if (w.device, dtype) not in cast:
                    cast[w.device, dtype] = Coefficients(*of_group.to(w.device, dtype).unbind())
                chosen.append(cast[w.device, dtype])
                noises.append(make_noise(now, w, m, number))
                own.weights.append(w)
                wide.weights.append(w.to(dtype))
                wide.gradients.append(g.to(dtype))
                own.iterates.append(m)
                wide.iterates.append(m.to(dtype))
                if offset is not None and own.offsets is not None and wide.offsets is not None:
                    own.offsets.append(as_real(offset))
                    wide.offsets.append(as_real(offset).to(dtype))
            number += 1
    if not own.weights:
        return
    coupled, decoupled = (any(_weight_decay(g, decoupled=d) for g in groups) for d in (False, True))
    scaled = scaled or any(g.options["maximize"] for g in groups)
    keep, gain, carry, push, shrink, follow, force_, weight_decay, scale = (
        list(column) for column in zip(*chosen, strict=True)
    )
    lists = Coefficients(
        keep,
        gain,
        carry,
        push,
        shrink if decoupled else 0.0,
        follow,
        force_,
        weight_decay if coupled else 0.0,
        scale if scaled else 1.0,
    )
    kept, computed = own.offsets or [], wide.offsets or None
    update_lists(Tensors(wide.weights, wide.gradients, wide.iterates, computed), lists)
    _store(own.weights, wide.weights, [None] * len(noises), 0)
    _store(own.iterates, wide.iterates, noises, 0)
    _store(kept, computed or [], noises, 16)


def _store(
    own: list[Tensor], computed: list[Tensor], noises: Sequence[Tensor | None], first_bit: int
) -> None:
    """Write what was computed in a wider dtype, rounded with 16 bits of the noise."""
    targets, values = [], []
    for target, value, noise in zip(own, computed, noises if own else (), strict=True):
        if target is not value:
            targets.append(target)
            if noise is not None:
                value = round_stochastically(value, (noise >> first_bit) & 0xFFFF)
            values.append(value)
    if targets:
        torch._foreach_copy_(targets, values)


def _distance_squared(offsets: Sequence[Tensor], like: Tensor) -> Tensor:
    """r² = Σ‖δ‖², as in `distance`; added one by one, as stacking would need a kernel for each."""
    total = torch.zeros_like(like)
    real = [as_real(offset) for offset in offsets if offset.numel()]
    for dtype in dict.fromkeys([offset.dtype for offset in real]):
        norms = torch._foreach_norm(
            [offset for offset in real if offset.dtype == dtype], 2, dtype=wide_dtype(dtype)
        )
        for norm in norms:
            total = total + norm.to(total).square()
    return total


def _weight_decay(group: Tensors, *, decoupled: bool) -> float:
    """λ if the group's weight decay is of this kind, else 0."""
    options = group.options
    return options["weight_decay"] if options["decoupled_weight_decay"] is decoupled else 0.0


def _stack(numbers: Sequence[Any], like: Tensor) -> Tensor:
    """A vector of numbers or scalar tensors; a product turns a tracer's float into a tensor."""
    one = torch.ones((), dtype=like.dtype, device=like.device)
    return torch.stack(
        [n.reshape(()).to(one) if isinstance(n, Tensor) else one * n for n in numbers]
    )


def _write(scalar: Tensor, value: Tensor) -> None:
    """Write a scalar, as a vector of one: torch 2.10 loses compiled writes to 0-d CPU float64.

    Dynamo traces such inputs twice, and the second time drops what it takes for an unused number.
    """
    scalar.view(1).copy_(value.view(1))


# ------------------------------------------------------------------ noise


def make_noise(now: Tensor, weight: Tensor, iterate: Tensor, number: int) -> Tensor | None:
    """32 bits for each element, in int64: a function of step, tensor number and element.

    None if the state is not rounded stochastically.
    """
    wide = wide_dtype(torch.promote_types(weight.dtype, iterate.dtype))
    if iterate.dtype != torch.bfloat16 or wide != torch.float32:
        return None
    now = now.to(weight.device)
    key = mix_bits(now & 0xFFFFFFFF)
    key = mix_bits(key ^ (now >> 32))
    key = mix_bits(mix_bits(key ^ number))
    elements = torch.arange(weight.numel(), device=now.device).reshape(weight.shape)
    return mix_bits(key ^ (elements & 0xFFFFFFFF))
