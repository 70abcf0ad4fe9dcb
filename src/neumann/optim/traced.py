"""The step for a tracer such as torch.compile: one graph for all phases.

What the host works out in Python is arithmetic on tensors here, because a tracer would make
constants of numbers: clock, t, phase, μ, and each group's row (a e b f z h c λ ±1/grad_scale):

    warm-up    t = 0                    a=1 e=0 b=0 f=η z=ηλ h=1
    reset      t in the table           a=0 e=η b=0 f=0 z=0  h=1
    iterate    every other t            a=μ e=η b=μ f=η z=ηλ h=γ    c = α·r − β/R³, elsewhere 0
    skip       an overflow was found    a=1 e=0 b=0 f=0 z=0  h=1    the clock does not tick

`traced_update` does the rest. The rows of all groups are stacked, so that a compiler stores them
instead of working them out anew beside every weight.

It can fail in two ways, each with an error: `refuse` names what cannot be traced, and a compiler
asked for a full graph says what it could not. What eager steps check is taken on trust here: the
values of what schedulers move, groups that agree, and weights changed by somebody else.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from neumann.optim.checkpoint import CLOCK, SKIPPED
from neumann.optim.distance import force, root, scalar_dtype
from neumann.optim.execution import Work
from neumann.optim.phases import HORIZON, RESET_LIMIT, Shared, Timetable
from neumann.optim.traced_update import Row, decay_of, distance_squared, update

_Step = TypeVar("_Step", bound=Callable[..., Any])

EVALUATION_MODE = (
    "step() in evaluation mode would update the wrong weights: call optimizer.train() first"
)


class Called:
    """Whether the optimizer has stepped, for a scheduler that is stepped too early.

    torch's schedulers wrap step() to write it down in an attribute. No tracer looks into that
    wrapper, nor lets an optimizer's attributes be written: `unwrapped` and this do without both.
    """

    def __get__(self, optimizer: Any, owner: type) -> bool:
        scalars = getattr(optimizer, "_scalars", {})
        return any(int(scalars[key]) > 0 for key in (CLOCK, SKIPPED) if key in scalars)


def prepare() -> None:
    """Have the compiler take the table of resets for a constant.

    Not a decorator, which would import the compiler beside this module; an optimizer that is
    built imports it anyway.
    """
    torch.compiler.assume_constant_result(_resets)  # type: ignore[no-untyped-call]


def unwrapped(step: _Step) -> _Step:
    """Tell torch's schedulers that step() needs no wrapper."""
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def refuse(
    groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, Any], sharded: bool
) -> None:
    """Raise for what only an eager step can do."""
    options = groups[0]
    if sharded:
        raise RuntimeError(
            "a step whose parameters are divided among processes adds up their distances on the "
            "way, which cannot be compiled: call optimizer.step() itself"
        )
    if not options["training"]:
        raise RuntimeError(EVALUATION_MODE)
    if options["differentiable"]:
        raise RuntimeError(
            "a step with differentiable=True cannot be compiled: autograd records it as it runs, "
            "so call optimizer.step() itself"
        )
    if options["skip_nonfinite"] and distributed.is_available() and distributed.is_initialized():
        raise RuntimeError(
            "a step with skip_nonfinite=True asks all processes whether a gradient overflowed, "
            "which cannot be compiled: call optimizer.step() itself, or set skip_nonfinite=False"
        )
    for index, group in enumerate(groups):
        for number, p in enumerate(group["params"]):
            if (p.requires_grad or p.grad is not None) and p not in states:
                raise RuntimeError(
                    f"parameter {number} of group {index} was frozen until now and has no state, "
                    "which cannot be made while compiling: call optimizer.step() itself once"
                )


def step(
    works: Sequence[Work],
    shared: Shared,
    clock: Tensor,
    squared: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Tick, and update every group; `squared` is r² before and after.

    Gradients are divided by `grad_scale`. Where `found_inf` is not zero nothing changes.
    """
    device = squared.device
    skip = None if found_inf is None else found_inf.reshape(()).to(device) != 0
    now = clock.to(device) + 1
    warmup = shared.timetable.warmup_steps
    t = (now - warmup).clamp(min=0)
    resetting = _is_reset(t, shared.timetable)
    if skip is not None:
        resetting = resetting & ~skip
    rows = _rows(works, shared, t, resetting, root(squared), grad_scale, skip)
    # With a clock on the host and weights elsewhere μ is worked out twice, so that nobody waits.
    momenta = _momenta(works, (clock + 1 - warmup).clamp(min=0))
    for work, momentum in zip(works, momenta.unbind(), strict=True):
        _write(work.momentum, _unless(skip, momentum, work.momentum))
    update(works, rows, now, resetting, grad_scale is not None)
    if shared.cubic or shared.repulsive:
        offsets = [offset for work in works for offset in work.offsets or ()]
        _write(squared, distance_squared(offsets, squared))
    clock.add_(1 if skip is None else (~skip).to(clock.device, clock.dtype))


def _is_reset(t: Tensor, timetable: Timetable) -> Tensor:
    """Whether t stands in the table, or a whole number of intervals after its end."""
    times, interval = _resets(timetable.reset_steps, timetable.reset_growth)
    resetting = (torch.tensor(times, device=t.device) == t).any()
    if interval:
        beyond = t - times[-1]
        resetting = resetting | ((beyond > 0) & (beyond % interval == 0))
    return resetting


def _resets(reset_steps: int, reset_growth: float) -> tuple[tuple[int, ...], int]:
    return Timetable(0, reset_steps, reset_growth).resets(RESET_LIMIT, HORIZON)


def _momenta(works: Sequence[Work], t: Tensor) -> Tensor:
    """μ(t) = min(peak, 1 − 1/(1+t)) of each group; 0 in the warm-up, where t is."""
    ramp = 1 - 1 / (1 + t).to(scalar_dtype(t.device))
    return torch.minimum(ramp, _vector([work.options["momentum"] for work in works], ramp))


def _rows(
    works: Sequence[Work],
    shared: Shared,
    t: Tensor,
    resetting: Tensor,
    distance: Tensor,
    grad_scale: Tensor | None,
    skip: Tensor | None,
) -> Tensor:
    """The row of each group, as `phases` and `distance` have them; shape (groups, 9)."""
    warming, iterating = t == 0, (t > 0) & ~resetting
    lr = _vector([work.options["lr"] for work in works], distance)
    momentum = _momenta(works, t)
    zero, one = torch.zeros_like(lr), torch.ones_like(lr)
    c = zero
    if shared.cubic or shared.repulsive:
        c = force(
            distance,
            lr,
            momentum,
            shared.average,
            shared.cubic,
            shared.repulsive,
            shared.bounded,
        )
        c = torch.where(iterating, c, zero)
    coupled, decoupled = (
        _vector([decay_of(work.options, apart) for work in works], distance)
        for apart in (False, True)
    )
    scale = _vector([-1.0 if work.options["maximize"] else 1.0 for work in works], distance)
    if grad_scale is not None:
        scale = scale / grad_scale.reshape(()).to(scale)
    carry = torch.where(iterating, momentum, zero)
    columns = Row(
        keep=_unless(skip, torch.where(warming, one, carry), one),
        gain=_unless(skip, torch.where(warming, zero, lr), zero),
        carry=_unless(skip, carry, zero),
        push=_unless(skip, torch.where(resetting, zero, lr), zero),
        shrink=_unless(skip, torch.where(resetting, zero, lr * decoupled), zero),
        follow=_unless(skip, torch.where(iterating, shared.average * one, one), one),
        force=c,
        decay=coupled,
        scale=scale,
    )
    return torch.stack(columns, dim=1)


def _vector(numbers: Sequence[Any], like: Tensor) -> Tensor:
    """Numbers or tensors of one as a vector. A product is what makes a tracer's float a tensor."""
    one = torch.ones((), dtype=like.dtype, device=like.device)
    return torch.stack(
        [n.reshape(()).to(one) if isinstance(n, Tensor) else one * n for n in numbers]
    )


def _unless(skip: Tensor | None, value: Tensor, otherwise: Tensor) -> Tensor:
    return value if skip is None else torch.where(skip.to(value.device), otherwise, value)


def _write(scalar: Tensor, value: Tensor) -> None:
    """As vectors of one: compiled by torch 2.10, a write to a 0-d float64 of the CPU gets lost.

    Dynamo traces such inputs twice, and drops the second time what it takes for an unused number.
    """
    scalar.view(1).copy_(value.view(1))
