"""What a plot shows, as plain data: curves over seeds, phase marks, axes and a caption.

A curve is the mean of an arm's runs at each recorded step, with the range over the seeds. Against
seconds, a point lies at the mean time at which the seeds reached its step. A run that diverged has
a curve of its own instead of a part in the mean.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from neumann.lab.report.formatting import format_list, join_sentences
from neumann.lab.report.runs import ArmRuns, Phases, Reader, Run, Series, finite_values

Axis = Literal["epochs", "steps", "seconds"]
AXES: dict[Axis, str] = {
    "epochs": "epochs",
    "steps": "optimizer steps",
    "seconds": "training time, s",
}
MAX_POINTS = 2000  # of a curve; more cannot be seen and make the page slow
MAX_RESETS = 60  # of an arm; more marks run into each other
SEED_BANDS = "Lines are means over the seeds; bands span the lowest to the highest seed."


@dataclass(frozen=True)
class Curve:
    """One line of a plot. The four sequences have the same length; NaN is a gap."""

    label: str  # the arm
    index: int  # of the arm; it determines the color
    part: str  # what of the arm it shows: "mean", "diverged", "repulsive force", …
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...]  # equal to y if there is one run
    high: tuple[float, ...]

    @property
    def has_band(self) -> bool:
        return self.low != self.high

    @property
    def is_empty(self) -> bool:
        pairs = zip(self.x, self.y, strict=True)
        return not any(math.isfinite(x) and math.isfinite(y) for x, y in pairs)


@dataclass(frozen=True)
class PhaseMarks:
    """The phases of the Neumann arms that share a timetable, in the unit of the x axis."""

    labels: tuple[str, ...]  # the arms
    index: int
    warmup: float  # its end; 0: there was none
    resets: tuple[float, ...]  # empty also if there are too many
    note: str  # what is not marked


@dataclass(frozen=True)
class Point:
    label: str
    index: int
    part: Literal["diverged", "chosen"]
    x: float
    y: float | None  # None: at the bad end of the plot


@dataclass(frozen=True)
class Plot:
    name: str  # of its file, and its id on the page
    title: str
    y_label: str
    curves: tuple[Curve, ...]
    caption: str = ""
    x_label: str = ""
    phases: tuple[PhaseMarks, ...] = ()
    points: tuple[Point, ...] = ()
    low_is_good: bool = False  # then the bad end is the top
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = True  # the x axis
    bottom: float | None = None  # of the y axis, if it leaves values out
    target: float | None = None  # a score to reach
    target_label: str = ""
    ticks: tuple[float, ...] = ()  # of the x axis, if only certain values have a meaning
    separate: bool = False  # each point is a measurement of its own
    dodge: bool = False  # the arms have the same x: draw them side by side
    band_note: str = SEED_BANDS  # what the bands mean, if there are any


def make_curves(arm: ArmRuns, axis: Axis, read: Reader) -> list[Curve]:
    """Return the mean over the arm's runs and one curve per diverged run, without empty ones."""
    return average_runs(arm, axis, read) + trace_diverged(arm, axis, read)


def trace_diverged(arm: ArmRuns, axis: Axis, read: Reader) -> list[Curve]:
    curves = []
    for run in arm.diverged:
        series = sorted(read(run).items())
        x = tuple(locate(axis, [run], step) for step, _ in series)
        y = tuple(value for _, value in series)
        curves.append(Curve(arm.name, arm.index, "diverged", x, y, y, y))
    return [thin(curve) for curve in curves if not curve.is_empty]


def average_runs(
    arm: ArmRuns,
    axis: Axis,
    read: Reader,
    part: str = "mean",
    band: tuple[Reader, Reader] | None = None,  # its edges in each run; None: the values themselves
) -> list[Curve]:
    """Return the mean over the arm's runs, or nothing if there is none to draw."""
    if not arm.averaged:
        return []
    values, lows, highs = (
        [f(run) for run in arm.averaged] for f in (read, *(band or (read, read)))
    )
    steps = sorted(set.intersection(*map(set, values)))

    def columns(series: list[Series]) -> list[list[float]]:
        found = [[of_run[step] for of_run in series] for step in steps]
        # One missing value makes a gap: the mean of the rest would be a mean of other runs.
        return [each if all(map(math.isfinite, each)) else [math.nan] for each in found]

    x = tuple(locate(axis, arm.averaged, step) for step in steps)
    y = tuple(math.fsum(column) / len(column) for column in columns(values))
    low, high = tuple(map(min, columns(lows))), tuple(map(max, columns(highs)))
    curve = Curve(arm.name, arm.index, part, x, y, low, high)
    return [] if curve.is_empty else [thin(curve)]


def locate(axis: Axis, runs: Sequence[Run], step: int) -> float:
    """Return where a step lies on an axis; for seconds, the mean over the runs."""
    if axis == "steps":
        return float(step)
    if axis == "epochs":
        per_epoch = next((run.steps_per_epoch for run in runs if run.steps_per_epoch), None)
        return math.nan if per_epoch is None else step / per_epoch
    return math.fsum(run.seconds_at(step) for run in runs) / len(runs)


def thin(curve: Curve, max_points: int = MAX_POINTS) -> Curve:
    """Reduce a curve to its lowest and highest point in each of many stretches, so peaks stay."""
    count = len(curve.x)
    if count <= max_points:
        return curve
    size = -(-count // (max_points // 2))
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
    # The stretches of a single run have a range too, but that is not a band over seeds.
    low_high = (lows, highs) if curve.has_band else (y, y)
    return Curve(curve.label, curve.index, curve.part, x, y, *low_high)


def annotate(plot: Plot, arms: Sequence[ArmRuns], axis: Axis) -> Plot:
    """Label the x axis; add the phases of the arms, and a cross where a run diverged."""
    crosses = []
    for curve in plot.curves:
        if curve.part == "diverged":
            finite = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(y)]
            crosses.append(Point(curve.label, curve.index, "diverged", *finite[-1]))
    note = "×\u00a0ends a run that diverged, at its last recorded value." if crosses else ""
    caption, phases = join_sentences(plot.caption, note), _mark_phases(arms, axis)
    points, x_label = tuple(crosses), AXES[axis]
    return replace(plot, phases=phases, points=points, caption=caption, x_label=x_label)


def _mark_phases(arms: Sequence[ArmRuns], axis: Axis) -> tuple[PhaseMarks, ...]:
    """Mark each timetable once, as the run that got furthest has it."""
    sharing: dict[Phases, list[ArmRuns]] = {}
    for arm in arms:
        furthest = max(arm.averaged or arm.runs, key=lambda run: run.last_step, default=None)
        if furthest is not None and furthest.phases is not None:
            sharing.setdefault(furthest.phases, []).append(arm)
    marks = []
    for phases, group in sharing.items():
        runs = group[0].averaged or group[0].runs
        labels = tuple(arm.name for arm in group)
        resets, note = phases.resets, ""
        if len(resets) > MAX_RESETS:
            note = f"The {len(resets):,} resets of {format_list(labels)} are too many to mark."
            resets = ()
        elif not phases.complete:
            note = "Older records: only resets that a recorded line mentions are marked."
        warmup = locate(axis, runs, phases.warmup_steps)
        places = tuple(finite_values(locate(axis, runs, step) for step in resets))
        marks.append(PhaseMarks(labels, group[0].index, warmup, places, note))
    return tuple(marks)


def explain_marks(plots: Sequence[Plot]) -> str:
    """Say what bands, shades and dotted lines mean in these plots."""
    bands = [plot.band_note for plot in plots if any(curve.has_band for curve in plot.curves)]
    marks = max((plot.phases for plot in plots), key=len, default=())
    meaning = ""
    if len(marks) > 1:
        meaning = "At the bottom, in the arm's color: a bar for its warm-up, | for a reset."
    elif marks and (marks[0].warmup > 0 or marks[0].resets):
        arms, owner = format_list(marks[0].labels), "its" if len(marks[0].labels) == 1 else "their"
        meaning = f"Shaded: the warm-up of {arms}; dotted: {owner} resets."
        if not marks[0].resets:
            meaning = f"Shaded: the warm-up of {arms}."
        elif marks[0].warmup <= 0:
            meaning = f"Dotted: the resets of {arms}."
    notes = dict.fromkeys(mark.note for mark in marks)
    return join_sentences(*dict.fromkeys(bands), meaning, *notes)
