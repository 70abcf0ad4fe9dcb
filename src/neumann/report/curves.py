"""Curves over seeds: the mean of an arm's runs at each recorded step, and how far they spread.

Seeds are averaged at equal steps, also against seconds: there the place of a point is the mean time
at which the seeds came to that step. A run that diverged is no part of a mean, in which it would
be missing from its last line on; it is drawn for itself up to there. Runs that have not ended are
drawn only where an arm has none that has.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from neumann.report.runs import Run, Track

Axis = Literal["epochs", "steps", "seconds"]
AXES: dict[Axis, str] = {
    "epochs": "epochs",
    "steps": "optimizer steps",
    "seconds": "training time, s",
}
MOST = 2000  # points of a curve; more are not seen and make the page slow


@dataclass(frozen=True)
class ArmRuns:
    """An arm and those of its runs that were begun."""

    name: str
    place: int  # among the arms: it gives the colour
    runs: tuple[Run, ...]

    @property
    def drawn(self) -> tuple[Run, ...]:
        """The runs that go into means."""
        sound = [run for run in self.runs if run.diverged is None]
        ended = [run for run in sound if run.summary is not None]
        return tuple(ended or sound)

    @property
    def diverged(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.diverged is not None)


@dataclass(frozen=True)
class Curve:
    """One line of a plot. The four sequences have the same length; NaN is a gap."""

    label: str
    place: int
    part: str  # what it is of the arm: "mean", "diverged", "repulsive force", …
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...]  # equal to y where there is one run
    high: tuple[float, ...]

    @property
    def spread(self) -> bool:
        return self.low != self.high

    @property
    def finite(self) -> bool:
        """Whether there is anything to draw."""
        pairs = zip(self.x, self.y, strict=True)
        return any(math.isfinite(x) and math.isfinite(y) for x, y in pairs)


def place_of(axis: Axis, runs: Sequence[Run], step: int) -> float:
    """Where a step lies on an axis: for seconds, the mean over the runs."""
    if axis == "steps":
        return float(step)
    if axis == "epochs":
        per_epoch = next((run.steps_per_epoch for run in runs if run.steps_per_epoch), None)
        return math.nan if per_epoch is None else step / per_epoch
    return math.fsum(run.seconds_at(step) for run in runs) / len(runs)


def arm_curves(
    arm: ArmRuns, axis: Axis, of: Callable[[Run], Track], part: str = "mean"
) -> list[Curve]:
    """The mean over the arm's runs, and each run that diverged; those with something to draw."""
    made = []
    if arm.drawn:
        made.append(_mean(arm, axis, [of(run) for run in arm.drawn], part))
    for run in arm.diverged:
        track = of(run)
        x = tuple(place_of(axis, [run], step) for step in sorted(track))
        y = tuple(track[step] for step in sorted(track))
        made.append(Curve(arm.name, arm.place, "diverged", x, y, y, y))
    return [thinned(curve) for curve in made if curve.finite]


def _mean(arm: ArmRuns, axis: Axis, tracks: Sequence[Track], part: str) -> Curve:
    steps = sorted(set.intersection(*(set(track) for track in tracks)))
    values = [[track[step] for track in tracks] for step in steps]
    # One value that is none makes a gap: a mean over the rest would be of other runs.
    whole = [all(math.isfinite(value) for value in found) for found in values]
    pairs = list(zip(values, whole, strict=True))
    return Curve(
        arm.name,
        arm.place,
        part,
        tuple(place_of(axis, arm.drawn, step) for step in steps),
        tuple(math.fsum(found) / len(found) if good else math.nan for found, good in pairs),
        tuple(min(found) if good else math.nan for found, good in pairs),
        tuple(max(found) if good else math.nan for found, good in pairs),
    )


def thinned(curve: Curve, most: int = MOST) -> Curve:
    """At most so many points: of each stretch its lowest and its highest, and its whole spread.

    So no peak is lost, which leaving out every other point would do.
    """
    count = len(curve.x)
    if count <= most:
        return curve
    size = -(-count // (most // 2))
    kept: list[tuple[float, float, float, float]] = []
    for start in range(0, count, size):
        stretch = range(start, min(start + size, count))
        finite = [index for index in stretch if math.isfinite(curve.y[index])]
        if not finite:
            kept.append((curve.x[start], math.nan, math.nan, math.nan))
            continue
        low = min(curve.low[index] for index in finite)
        high = max(curve.high[index] for index in finite)
        lowest = min(finite, key=curve.y.__getitem__)
        highest = max(finite, key=curve.y.__getitem__)
        for index in sorted({lowest, highest}):
            kept.append((curve.x[index], curve.y[index], low, high))
    x, y, lows, highs = zip(*kept, strict=True)
    # A single run has no spread, also after thinning.
    return Curve(
        curve.label, curve.place, curve.part, x, y, *((lows, highs) if curve.spread else (y, y))
    )
