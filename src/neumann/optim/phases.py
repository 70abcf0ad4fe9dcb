"""Which phase a step is in, and the coefficients that the update takes there.

Steps are counted from 1. The first W = `warmup_steps` are the warm-up. After it t = 1, 2, 3, … and
a reset falls on t = 1, 1 + I₀, 1 + I₀ + I₁, … with intervals Iᵢ = max(1, ⌊K·growthⁱ + ½⌋), where K
is `reset_steps` and growth `reset_growth`. With K = 0 the reset at t = 1 is the only one. Every
other step iterates. The phases differ only in the coefficients of the update (its equations are in
:mod:`neumann.optim.update`; R is in :mod:`neumann.optim.distance`):

                a    e    b    f    z    h    c
    warm-up     1    0    0    η    ηλ   1    0
    reset       0    η    0    0    0    1    0
    iterate     μ    η    μ    η    ηλ   γ    α·r − β/R³

z is zero unless the weight decay λ is decoupled.

Everything here takes Python numbers or tensors: an eager step computes with numbers, a traced step
with tensors, because a tracer would turn numbers into constants. The Triton kernel has its own copy
(`backends/cuda/scalars_kernel.py`).
"""

import enum
import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

# A table of reset times ends beyond any clock, or after this many entries.
HORIZON = 1 << 62
RESET_LIMIT = 1 << 16


class Phase(enum.StrEnum):
    """What a step does."""

    WARMUP = "warm-up"
    RESET = "reset"
    ITERATE = "iterate"

    @property
    def warming(self) -> bool:
        return self is Phase.WARMUP

    @property
    def resetting(self) -> bool:
        return self is Phase.RESET


class TensorPhase(NamedTuple):
    """The phase of a traced step: two boolean tensors, at most one of them true."""

    warming: Tensor
    resetting: Tensor


class Place(NamedTuple):
    """Where a step stands in the run: its phase, and t (0 in the warm-up)."""

    phase: Phase
    t: int


class Coefficients(NamedTuple):
    """The coefficients of the update, in one step. A coefficient of zero drops its term."""

    keep: Any  # a: what m keeps of itself; 0 overwrites it
    gain: Any  # e: how much of d enters m
    carry: Any  # b: how much of the new m moves w
    push: Any  # f: how much of d moves w
    shrink: Any  # z: decoupled weight decay
    follow: Any  # h: what δ keeps after w moved
    force: Any = 0.0  # c: attraction and repulsion
    weight_decay: Any = 0.0  # λ of L2 weight decay
    scale: Any = 1.0  # of the gradient: ±1/grad_scale


# The coefficients of an update that changes nothing.
IDLE = Coefficients(keep=1.0, gain=0.0, carry=0.0, push=0.0, shrink=0.0, follow=1.0)


@dataclass(frozen=True)
class Timetable:
    """When the phases come."""

    warmup_steps: int
    reset_steps: int
    reset_growth: float

    def place(self, step: int) -> Place:
        """The place of the step-th call of step(), counted from 1 (0: before the first call)."""
        now = max(step - self.warmup_steps, 0)
        if now == 0:
            return Place(Phase.WARMUP, 0)
        return Place(Phase.RESET if self.is_reset(now) else Phase.ITERATE, now)

    def place_traced(self, step: Tensor) -> tuple[TensorPhase, Tensor]:
        """The same for a traced step, whose clock is a tensor."""
        t = (step - self.warmup_steps).clamp(min=0)
        return TensorPhase(t == 0, self.is_reset(t)), t

    def is_reset(self, t: Any) -> Any:
        """Whether t is in the table of resets, or a whole number of intervals after its end."""
        times, interval = reset_table(self.reset_steps, self.reset_growth)
        listed: Any
        if isinstance(t, Tensor):
            listed = (torch.tensor(times, device=t.device) == t).any()
        else:
            index = bisect_left(times, t)
            listed = index < len(times) and times[index] == t
        if not interval:
            return listed
        beyond = t - times[-1]
        return listed | ((beyond > 0) & (beyond % interval == 0))

    def next_reset(self, t: int) -> int | None:
        """The first reset at t or later; None if there is none."""
        times, interval = reset_table(self.reset_steps, self.reset_growth)
        if t <= times[-1]:
            return times[bisect_left(times, t)]
        if not interval:
            return None
        return times[-1] - (times[-1] - t) // interval * interval


def reset_table(reset_steps: int, reset_growth: float) -> tuple[tuple[int, ...], int]:
    """The times of resets, sorted, and the interval at which they continue (0: they do not).

    With growth 1 two times say it all. With growth above 1 they pass the horizon after some hundred
    entries, unless the growth is within 1e-4 of 1: then the intervals stop growing at the limit.
    """
    # Two functions, because a tracer must not look into a cache: see `tracing`.
    return _compute_reset_table(reset_steps, reset_growth)


@lru_cache(maxsize=64)
def _compute_reset_table(reset_steps: int, reset_growth: float) -> tuple[tuple[int, ...], int]:
    times = [1]
    if reset_steps == 0:
        return tuple(times), 0
    if reset_growth == 1:
        return (1, 1 + reset_steps), reset_steps
    interval = 0
    while len(times) < RESET_LIMIT:
        interval = _interval(reset_steps, reset_growth, len(times) - 1)
        if times[-1] + interval > HORIZON:
            return tuple(times), 0
        times.append(times[-1] + interval)
    return tuple(times), interval


def _interval(reset_steps: int, reset_growth: float, index: int) -> int:
    try:
        return max(1, math.floor(reset_steps * reset_growth**index + 0.5))
    except OverflowError:
        return HORIZON


def momentum_at(t: Any, peak: Any) -> Any:
    """μ(t) = min(peak, 1 − 1/(1+t)): 0 in the warm-up, 0.5 at t = 1; a peak of 0.9 at t = 9."""
    ramp = 1 - 1 / (1 + t)
    return torch.minimum(ramp, peak) if isinstance(ramp, Tensor) else min(peak, ramp)


def choose_coefficients(
    phase: Phase | TensorPhase,
    lr: Any,
    momentum: Any,
    average: Any,
    decoupled_weight_decay: Any,
    force: Any = 0.0,
    weight_decay: Any = 0.0,
    scale: Any = 1.0,
) -> Coefficients:
    """The line of the table for a phase, at learning rate η, momentum μ, average γ and decay λ.

    `force` is c; it acts in the iterate phase alone.
    """
    warming, resetting = phase.warming, phase.resetting
    carry = _choose(warming, 0.0, _choose(resetting, 0.0, momentum))
    return Coefficients(
        keep=_choose(warming, 1.0, carry),
        gain=_choose(warming, 0.0, lr),
        carry=carry,
        push=_choose(resetting, 0.0, lr),
        shrink=_choose(resetting, 0.0, lr * decoupled_weight_decay),
        follow=_choose(warming, 1.0, _choose(resetting, 1.0, average)),
        force=_choose(warming, 0.0, _choose(resetting, 0.0, force)),
        weight_decay=weight_decay,
        scale=scale,
    )


row = choose_coefficients  # its name in version 0.1


def _choose(condition: Any, then: Any, otherwise: Any) -> Any:
    """`then` where the condition holds, whether it is a number or a tensor."""
    if isinstance(condition, Tensor):
        return torch.where(condition, then, otherwise)
    return then if condition else otherwise
