"""Which phase a step is in, and the coefficients that the one update takes there.

Steps are counted from 1. The first W are the warm-up; after it t = 1, 2, 3, … and a reset falls on
t = 1, 1 + I₀, 1 + I₀ + I₁, … with the intervals Iᵢ = max(1, ⌊K·growthⁱ + ½⌋). K = 0 means that the
reset at t = 1 stays the only one. Every other step iterates. The phases differ by a row only:

    d  = g + c·δ            warm-up        reset          iterate
    m  ← a·m − e·d          a=1 e=0        a=0 e=η        a=μ e=η
    s  = b·m − f·d − z·w    b=0 f=η z=ηλ   b=0 f=0 z=0    b=μ f=η z=ηλ
    w  ← w + s
    δ  ← h·(δ + s)          h=1            h=1            h=γ

(z is zero unless the weight decay λ is decoupled.) Pure Python: nothing here knows of tensors, but
a row built from a tensor learning rate holds tensors.
"""

import enum
import math
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# A table of reset times ends where no clock gets to, or after so many of them.
HORIZON = 1 << 62
RESET_LIMIT = 1 << 16


class Phase(enum.StrEnum):
    """What a step does."""

    WARMUP = "warm-up"
    RESET = "reset"
    ITERATE = "iterate"


class Place(NamedTuple):
    """Where a step stands in the run: its phase, and t (0 in the warm-up)."""

    phase: Phase
    t: int


class Row(NamedTuple):
    """The coefficients of one update; the letters are those of the module's table."""

    keep: Any  # a: what m keeps of itself; 0 overwrites it
    gain: Any  # e: how much of d enters m
    carry: Any  # b: how much of the new m moves w
    push: Any  # f: how much of d moves w
    decay: Any  # z: decoupled weight decay
    follow: Any  # h: what δ keeps after w moved


# The row of an update that changes nothing.
IDLE = Row(1.0, 0.0, 0.0, 0.0, 0.0, 1.0)


@dataclass(frozen=True)
class Timetable:
    """When the phases come. Reset times are worked out as far as they were asked for, and kept."""

    warmup_steps: int
    reset_steps: int
    reset_growth: float
    _resets: list[int] = field(default_factory=lambda: [1], init=False, repr=False, compare=False)

    def place(self, step: int) -> Place:
        """The place of the step-th call of step(), counted from 1 (0: before the first)."""
        t = step - self.warmup_steps
        if t <= 0:
            return Place(Phase.WARMUP, 0)
        return Place(Phase.RESET if self.next_reset(t) == t else Phase.ITERATE, t)

    def next_reset(self, t: int) -> int | None:
        """The first reset at t or later; None if there is none."""
        if t <= 1:
            return 1
        if self.reset_steps == 0:
            return None
        if self.reset_growth == 1.0:
            return 1 + math.ceil((t - 1) / self.reset_steps) * self.reset_steps
        while self._resets[-1] < t:
            self._resets.append(self._resets[-1] + self._interval(len(self._resets) - 1))
        return self._resets[bisect_left(self._resets, t)]

    def resets(self, limit: int, horizon: int) -> tuple[tuple[int, ...], int]:
        """Reset times, sorted, and the interval at which they go on after the last (0: never).

        With growth 1 two of them say it all. With growth above 1 they pass the horizon after some
        hundred, unless the growth is within 1e-4 of 1: then the intervals stop growing at the end.
        """
        times = [1]
        interval = 0
        while len(times) < limit:
            following = self.next_reset(times[-1] + 1)
            if following is None or following > horizon:
                interval = 0
                break
            interval = following - times[-1]
            times.append(following)
            if self.reset_growth == 1.0:
                break
        return tuple(times), interval

    def _interval(self, index: int) -> int:
        return max(1, math.floor(self.reset_steps * self.reset_growth**index + 0.5))


@dataclass(frozen=True)
class Shared:
    """What all groups have in common in a step."""

    timetable: Timetable
    cubic: float  # α
    repulsive: float  # β, times the number of variables
    average: float  # γ
    bounded: bool


def momentum_at(t: int, peak: Any) -> Any:
    """μ(t) = min(peak, 1 − 1/(1+t)): 0.5 at t = 1, 0.9 from t = 9 on; 0 in the warm-up."""
    return min(peak, 1 - 1 / (1 + t)) if t > 0 else 0.0


def row(phase: Phase, lr: Any, momentum: Any, average: float, decoupled_decay: float) -> Row:
    """The phase's row, for learning rate η, momentum μ, average γ and decoupled decay λ."""
    if phase is Phase.WARMUP:
        return Row(keep=1.0, gain=0.0, carry=0.0, push=lr, decay=lr * decoupled_decay, follow=1.0)
    if phase is Phase.RESET:
        return Row(keep=0.0, gain=lr, carry=0.0, push=0.0, decay=0.0, follow=1.0)
    return Row(
        keep=momentum,
        gain=lr,
        carry=momentum,
        push=lr,
        decay=lr * decoupled_decay,
        follow=average,
    )
