"""The curvature along a training: λ_max and λ_min, and the μ and η they imply beside those used.

Bands are the errors that the records state, over all seeds: from the lowest value less its error to
the highest plus its own; where they would flatten the curves they are cut. A point that had not
converged within its budget is drawn hollow. Runs without lines of kind "spectrum" have no curves.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from neumann.report import wording
from neumann.report.curves import AXES, ArmRuns, Curve, arm_curves
from neumann.report.palette import HOLLOW
from neumann.report.plots import Plot, dressed, finite
from neumann.report.runs import LARGEST, Run, Track, number, step_of
from neumann.report.studies import Study

RATIO = 20  # of values that a log axis shows better
BATCHES = (("probe", "probe batch"), ("current", "current batch"))
SCHEDULED = "scheduled"
ERRORS = "Bands hold the errors of the measurements."
SEEDS = "Lines are means over the seeds; bands hold the errors of the measurements of all seeds."
CUT = "Errors that reach further than the axis are cut."


def curvature_plots(study: Study) -> list[Plot]:
    """Empty where no run has measured."""
    arms = [arm for arm in study.arms if any(_lines(run) for run in arm.runs)]
    largest = _measured(arms, "largest")
    smallest = _measured(arms, "smallest")
    rates = _implied(arms, "implied_lr", "lr")
    momenta = _implied(arms, "implied_momentum", "momentum")
    made = [
        Plot(
            "curvature-largest",
            "Largest eigenvalue of the Hessian, λ max",
            AXES["epochs"],
            "λ max",
            largest,
            "Of the training loss, at the weights of training, without weight decay.",
        ),
        Plot(
            "curvature-smallest",
            "Smallest eigenvalue of the Hessian, λ min",
            AXES["epochs"],
            "λ min",
            smallest,
            "Below zero the loss curves downwards in some direction.",
        ),
        Plot(
            "curvature-lr",
            "Learning rate, and 1/λ max",
            AXES["epochs"],
            "learning rate",
            rates,
            "On one scale for SGD and Neumann; Adam and its kin rescale the gradient.",
        ),
        Plot(
            "curvature-momentum",
            "Momentum, and μ = λ max/(|λ min| + λ max)",
            AXES["epochs"],
            "μ",
            momenta,
            "The μ at which the paper’s B̂ is just not indefinite.",
        ),
    ]
    bands = SEEDS if any(len(arm.drawn) > 1 for arm in arms) else ERRORS
    return [
        dressed(replace(_with_log(_with_cut(plot)), bands=bands), study.arms, "epochs")
        for plot in made
        if plot.curves
    ]


def _measured(arms: Sequence[ArmRuns], end: str) -> tuple[Curve, ...]:
    """An end on both batches, with its errors."""
    curves: list[Curve] = []
    for arm in arms:
        for batch, part in BATCHES:
            value = _track(batch, end)
            error = _track(batch, f"{end}_error")
            found = arm_curves(arm, "epochs", value, part)
            below = arm_curves(arm, "epochs", _combined(value, error, -1), part)
            above = arm_curves(arm, "epochs", _combined(value, error, 1), part)
            curves += _banded(found, below, above, part, with_diverged=batch == "probe")
            curves += _hollow(arm, value, _track(batch, f"{end}_converged"))
    return tuple(curves)


def _implied(arms: Sequence[ArmRuns], name: str, scheduled: str) -> tuple[Curve, ...]:
    """What the ends imply, as far as they are known; and what was used."""
    curves: list[Curve] = []
    for arm in arms:
        implied: list[Curve] = []
        for batch, part in BATCHES:
            found = arm_curves(arm, "epochs", _track(batch, name), part)
            low, high = (
                arm_curves(arm, "epochs", _bound(batch, name, sign), part) for sign in (-1, 1)
            )
            implied += _banded(found, low, high, part, with_diverged=False)
        if implied:
            used = arm_curves(
                arm, "epochs", lambda run: run.track("spectrum", scheduled), SCHEDULED
            )
            curves += implied + [curve for curve in used if curve.part == SCHEDULED]
    return tuple(curves)


def _banded(
    found: Sequence[Curve],
    below: Sequence[Curve],
    above: Sequence[Curve],
    part: str,
    *,
    with_diverged: bool,
) -> list[Curve]:
    """The mean with a band down to the lowest of `below` and up to the highest of `above`."""
    made = [curve for curve in found if curve.part != part and with_diverged]
    for curve in found:
        low = next((each for each in below if each.part == part), curve)
        high = next((each for each in above if each.part == part), curve)
        if curve.part == part:
            same = low.x == curve.x == high.x  # else they were thinned, each in its own way
            made.append(replace(curve, low=low.low, high=high.high) if same else curve)
    return made


def _hollow(
    arm: ArmRuns, value: Callable[[Run], Track], converged: Callable[[Run], Track]
) -> list[Curve]:
    """The points of the mean at which some seed had not converged."""
    unsure = {step for run in arm.drawn for step, sure in converged(run).items() if sure == 0}

    def only(run: Run) -> Track:
        return {step: found for step, found in value(run).items() if step in unsure}

    found = arm_curves(arm, "epochs", only, HOLLOW)
    # The band is that of the line they lie on.
    return [replace(curve, low=curve.y, high=curve.y) for curve in found if curve.part == HOLLOW]


def _track(batch: str, name: str) -> Callable[[Run], Track]:
    """A number of the lines about one batch; flags are 0 and 1, what failed is NaN."""

    def of(run: Run) -> Track:
        found = {}
        for line in _lines(run):
            about = line.get(batch)
            value = about.get(name) if isinstance(about, dict) else None
            if value == math.inf:  # an error without a bound: as far as the axis goes
                value = LARGEST
            found[step_of(line)] = float(value) if isinstance(value, bool) else number(value)
        return found

    return of


def _combined(
    value: Callable[[Run], Track], error: Callable[[Run], Track], sign: int
) -> Callable[[Run], Track]:
    def of(run: Run) -> Track:
        errors = error(run)
        return {step: found + sign * errors[step] for step, found in value(run).items()}

    return of


def _bound(batch: str, name: str, sign: int) -> Callable[[Run], Track]:
    """How low or high 1/λ_max or μ can be, for ends that lie outside the values."""
    ends = ("smallest", "smallest_error", "largest", "largest_error")
    tracks = [_track(batch, end) for end in ends]

    def of(run: Run) -> Track:
        found = {}
        columns = [track(run) for track in tracks]
        for step in columns[0]:
            low, below, high, above = (column[step] for column in columns)
            if name == "implied_lr":
                top = high + above if sign < 0 else high
                found[step] = 1 / top if top > 0 else math.nan
                continue
            sizes = abs(low), abs(low - below)
            depth, top = (max(sizes), high) if sign < 0 else (min(sizes), high + above)
            found[step] = top / (depth + top) if top > 0 else math.nan
        return found

    return of


def _lines(run: Run) -> list[dict[str, object]]:
    return [line for line in run.lines if line.get("kind") == "spectrum"]


def _with_cut(plot: Plot) -> Plot:
    """Bands no further from the values than these are apart, or than half their size."""
    values = [value for curve in plot.curves for value in finite(curve.y)]
    room = max(max(values) - min(values), max(map(abs, values)) / 2)
    low, high = min(values) - room, max(values) + room
    curves = tuple(
        replace(curve, low=_within(curve.low, low, high), high=_within(curve.high, low, high))
        for curve in plot.curves
    )
    same = all(finite(a.low + a.high) == finite(b.low + b.high) for a, b in _pairs(plot, curves))
    return replace(plot, curves=curves, caption=plot.caption if same else f"{plot.caption} {CUT}")


def _with_log(plot: Plot) -> Plot:
    """On a log axis where all is positive and far apart; it leaves out a schedule's way to 0."""
    sound = [curve for curve in plot.curves if curve.part not in ("diverged", SCHEDULED)]
    values = [value for curve in sound or plot.curves for value in finite(curve.y)]
    every = values + [value for curve in plot.curves for value in finite(curve.y) if value > 0]
    if min(values) <= 0 or max(every) <= RATIO * min(every):
        return plot
    floor = max(min(every) / 2, min(values) / 50)
    curves = tuple(replace(curve, low=_within(curve.low, floor, math.inf)) for curve in plot.curves)
    left_out = any(value < floor for curve in plot.curves for value in finite(curve.y))
    note = (
        f" Values below {wording.short(float(f'{floor:.1g}'))} are not shown." if left_out else ""
    )
    return replace(
        plot,
        curves=curves,
        caption=plot.caption + note,
        log_y=True,
        bottom=floor if left_out else None,
    )


def _within(values: tuple[float, ...], low: float, high: float) -> tuple[float, ...]:
    return tuple(min(max(value, low), high) if math.isfinite(value) else value for value in values)


def _pairs(plot: Plot, curves: tuple[Curve, ...]) -> list[tuple[Curve, Curve]]:
    return list(zip(plot.curves, curves, strict=True))
