"""What each plot of a page shows, as plain data: curves, marks, axes and the caption.

Nothing here draws (see drawing). A plot without any curve is not made.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from neumann.report import wording
from neumann.report.curves import ArmRuns, Axis, Curve, place_of
from neumann.report.phases import Phases, phases_of

SEEDS = "Lines are means over the seeds; bands reach from the lowest to the highest seed."
MARKS_MOST = 60  # resets of an arm that can be told apart


@dataclass(frozen=True)
class Mark:
    """The phases of Neumann arms that have them in common, in the unit of the x axis."""

    labels: tuple[str, ...]  # the arms
    place: int
    warmup: float  # its end; 0: there was none
    resets: tuple[float, ...]  # empty also where there are too many to be told apart
    note: str  # what is not shown


@dataclass(frozen=True)
class Spot:
    """One point that means something."""

    label: str
    place: int
    part: str  # "diverged" or "chosen"
    x: float
    y: float | None  # None: at the foot of the plot


@dataclass(frozen=True)
class Plot:
    """One picture."""

    name: str  # of its file, and of its place on the page
    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    caption: str
    marks: tuple[Mark, ...] = ()
    spots: tuple[Spot, ...] = ()
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = True  # the x axis
    bottom: float | None = None  # of the y axis, where it leaves something out
    target: float | None = None  # a level to reach
    ticks: tuple[float, ...] = field(default=())  # of the x axis, where they are not any numbers
    points: bool = False  # each point is a measurement of its own
    bands: str = SEEDS  # what they mean, where there are any


def dressed(plot: Plot, arms: Sequence[ArmRuns], axis: Axis) -> Plot:
    """With phases, crosses where runs diverged, and the sentences that explain what is there."""
    marks = _marks(arms, axis)
    crosses = tuple(
        Spot(curve.label, curve.place, "diverged", *_last(curve))
        for curve in plot.curves
        if curve.part == "diverged"
    )
    sentences = [
        plot.caption,
        "× ends a run that diverged, at its last recorded value." if crosses else "",
    ]
    caption = " ".join(sentence for sentence in sentences if sentence)
    return replace(plot, marks=marks, spots=crosses, caption=caption)


def guide(plots: Sequence[Plot]) -> str:
    """How to read these plots: what bands, shades and lines mean in them."""
    bands = [plot.bands for plot in plots if any(curve.spread for curve in plot.curves)]
    marks = max((plot.marks for plot in plots), key=len, default=())
    sentences = list(dict.fromkeys(bands))
    if len(marks) == 1:
        whose = wording.listed(marks[0].labels)
        both = marks[0].warmup > 0 and marks[0].resets
        if both:
            owner = "its" if len(marks[0].labels) == 1 else "their"
            sentences.append(f"Shaded: the warm-up of {whose}; dotted: {owner} resets.")
        elif marks[0].resets:
            sentences.append(f"Dotted: the resets of {whose}.")
        elif marks[0].warmup > 0:
            sentences.append(f"Shaded: the warm-up of {whose}.")
    elif marks:
        sentences.append("At the foot, in the arm’s colour: a bar for its warm-up, | for a reset.")
    sentences += dict.fromkeys(mark.note for mark in marks if mark.note)
    return " ".join(sentences)


def _marks(arms: Sequence[ArmRuns], axis: Axis) -> tuple[Mark, ...]:
    """One for each timetable, of the run that got furthest."""
    known: dict[Phases, list[ArmRuns]] = {}
    for arm in arms:
        furthest = max(arm.drawn or arm.runs, key=lambda run: run.last_step, default=None)
        phases = None if furthest is None else phases_of(furthest)
        if phases is not None:
            known.setdefault(phases, []).append(arm)
    return tuple(_mark(phases, those, axis) for phases, those in known.items())


def _mark(phases: Phases, arms: Sequence[ArmRuns], axis: Axis) -> Mark:
    runs = arms[0].drawn or arms[0].runs
    labels = tuple(arm.name for arm in arms)
    whose, count, note = wording.listed(labels), len(phases.resets), ""
    if count > MARKS_MOST:
        note = f"The {count:,} resets of {whose} are too many to be marked."
    elif not phases.whole:
        note = f"Of {whose}, resets that no line of the records tells of are not marked."
    places = [place_of(axis, runs, step) for step in phases.resets]
    shown = tuple(place for place in places if math.isfinite(place)) if count <= MARKS_MOST else ()
    return Mark(labels, arms[0].place, place_of(axis, runs, phases.warmup), shown, note)


def focus(curves: Sequence[Curve]) -> tuple[float | None, str]:
    """Where an accuracy axis should begin so that the end of the runs can be read, and a note."""
    sound = [curve for curve in curves if curve.part != "diverged"]
    end = max((x for curve in sound for x in curve.x if math.isfinite(x)), default=0.0)
    every = [low for curve in sound for low in finite(curve.low)]
    late = [
        low
        for curve in sound
        for x, low in zip(curve.x, curve.low, strict=True)
        if x > 0.25 * end and math.isfinite(low)
    ]
    return begin(every, late)


def begin(every: list[float], wanted: list[float]) -> tuple[float | None, str]:
    if not wanted or max(every) == min(wanted):
        return None, ""
    bottom = min(wanted) - 0.06 * (max(every) - min(wanted))
    if min(every) >= bottom - (max(every) - bottom):
        return None, ""
    return bottom, f"The axis begins at {bottom:.3g} %; there are lower values, not shown."


def finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _last(curve: Curve) -> tuple[float, float]:
    pairs = zip(curve.x, curve.y, strict=True)
    return [(x, y) for x, y in pairs if math.isfinite(y)][-1]
