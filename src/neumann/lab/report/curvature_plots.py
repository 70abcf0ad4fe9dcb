"""Plots of curvature: the extreme eigenvalues along a run, and a density of eigenvalues.

Along a run: λ max and λ min, and the learning rate and momentum that they imply next to those
used. Bands span the recorded errors over all seeds; where they would flatten the curves they are
cut. A point that did not converge within its budget is drawn hollow.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from neumann.lab.report.formatting import format_short, join_sentences
from neumann.lab.report.palette import HOLLOW
from neumann.lab.report.plot import Axis, Curve, Plot, Point, annotate, average_runs, trace_diverged
from neumann.lab.report.runs import ArmRuns, Reader, Run, Series, finite_values
from neumann.lab.report.study_records import Study

LOG_RATIO = 20  # values further apart than this factor get a log axis
BATCHES = (("probe", "probe batch"), ("current", "current batch"))
SCHEDULED = "scheduled"
ERROR_BANDS = "Bands show the errors of the measurements."
SEED_ERROR_BANDS = (
    "Lines are means over the seeds; bands show the errors of the measurements of all seeds."
)
MATRICES = {
    "hessian": "Hessian",
    "hessian by differences": "Hessian by differences of gradients",
    "gauss-newton": "Gauss–Newton matrix",
}
CAPTIONS = {
    "largest": "Of the training loss, at the training weights, without weight decay.",
    "smallest": "Below zero, the loss curves downwards in some direction.",
    "lr": "The two compare directly for SGD and Neumann; Adam and its relatives rescale the "
    "gradient.",
    "momentum": "The μ at which the paper's B̂ just stops being indefinite.",
}


def plot_curvature(study: Study, axis: Axis) -> list[Plot]:
    """Plot the extreme eigenvalues and what they imply; an empty list if no run measured any."""
    arms = study.arms
    bands = SEED_ERROR_BANDS if any(_several_seeds(arm) for arm in arms) else ERROR_BANDS

    def make_plot(name: str, title: str, label: str, curves: list[Curve]) -> Plot:
        drawn = tuple(curves)
        return Plot(f"curvature-{name}", title, label, drawn, CAPTIONS[name], band_note=bands)

    largest, smallest = (_measured_curves(arms, axis, end) for end in ("largest", "smallest"))
    lr, momentum = (_implied_curves(arms, axis, name) for name in ("lr", "momentum"))
    plots = [
        make_plot("largest", "Largest eigenvalue of the Hessian, λ max", "λ max", largest),
        make_plot("smallest", "Smallest eigenvalue of the Hessian, λ min", "λ min", smallest),
        make_plot("lr", "Learning rate, and 1/λ max", "learning rate", lr),
        make_plot("momentum", "Momentum, and μ = λ max/(|λ min| + λ max)", "μ", momentum),
    ]
    drawn = [_use_log_axis(_cut_bands(plot)) for plot in plots if plot.curves]
    return [annotate(plot, arms, axis) for plot in drawn]


def _several_seeds(arm: ArmRuns) -> bool:
    return len(arm.averaged) > 1 and any(run.spectra("probe") for run in arm.runs)


def _measured_curves(arms: Sequence[ArmRuns], axis: Axis, end: str) -> list[Curve]:
    """Return one end of the spectrum on both batches, with its errors."""
    curves: list[Curve] = []
    for arm in arms:
        for batch, part in BATCHES:
            value = _reader(batch, lambda found: found[end])
            low = _reader(batch, lambda found: found[end] - found[f"{end}_error"])
            high = _reader(batch, lambda found: found[end] + found[f"{end}_error"])
            if batch == "probe":
                curves += trace_diverged(arm, axis, value)
            curves += average_runs(arm, axis, value, part, (low, high))
            curves += _unconverged_points(arm, axis, batch, end)
    return curves


def _implied_curves(arms: Sequence[ArmRuns], axis: Axis, name: str) -> list[Curve]:
    """Return the learning rate or momentum that the ends imply, and the one that was used."""
    curves: list[Curve] = []
    for arm in arms:
        implied: list[Curve] = []
        for batch, part in BATCHES:
            value = _reader(batch, lambda found: found[f"implied_{name}"])
            low, high = (_reader(batch, partial(_bound, name, lower)) for lower in (True, False))
            implied += average_runs(arm, axis, value, part, (low, high))
        curves += implied
        if implied:
            scheduled = partial(Run.series, kind="spectrum", name=name)
            curves += average_runs(arm, axis, scheduled, SCHEDULED)
    return curves


def _bound(name: str, lower: bool, found: Mapping[str, float]) -> float:
    """Return how low or high 1/λ max or μ can be, as the true ends lie outside those measured."""
    low, high = found["smallest"], found["largest"]
    top = high + found["largest_error"] if (name == "lr") == lower else high
    depth = (max if lower else min)(abs(low), abs(low - found["smallest_error"]))
    if not top > 0:
        return math.nan
    return 1 / top if name == "lr" else top / (depth + top)


def _unconverged_points(arm: ArmRuns, axis: Axis, batch: str, end: str) -> list[Curve]:
    """Return the points of the mean at which some seed did not converge."""
    spectra = [item for run in arm.averaged for item in run.spectra(batch).items()]
    unsure = {step for step, found in spectra if found[f"{end}_converged"] == 0}

    def read(run: Run) -> Series:
        return {step: found[end] for step, found in run.spectra(batch).items() if step in unsure}

    curves = average_runs(arm, axis, read, HOLLOW)
    # They have no band of their own; the line below them has one.
    return [replace(curve, low=curve.y, high=curve.y) for curve in curves]


def _reader(batch: str, compute: Callable[[Mapping[str, float]], float]) -> Reader:
    return lambda run: {step: compute(found) for step, found in run.spectra(batch).items()}


def _cut_bands(plot: Plot) -> Plot:
    """Let bands reach no further than the range of the values, or half their size if larger."""
    values = [value for curve in plot.curves for value in finite_values(curve.y)]
    room = max(max(values) - min(values), max(map(abs, values)) / 2)
    low, high = min(values) - room, max(values) + room
    edges = finite_values(edge for curve in plot.curves for edge in curve.low + curve.high)
    if low <= min(edges, default=low) and max(edges, default=high) <= high:
        return plot
    curves = tuple(
        replace(curve, low=_clamp(curve.low, low, high), high=_clamp(curve.high, low, high))
        for curve in plot.curves
    )
    note = "Errors that reach beyond the axis are cut."
    return replace(plot, curves=curves, caption=join_sentences(plot.caption, note))


def _use_log_axis(plot: Plot) -> Plot:
    """Use a log axis if all values are positive and far apart; it omits a schedule's way to 0."""
    healthy = [curve for curve in plot.curves if curve.part not in ("diverged", SCHEDULED)]
    values = [value for curve in healthy or plot.curves for value in finite_values(curve.y)]
    every = values + [v for curve in plot.curves for v in finite_values(curve.y) if v > 0]
    if min(values) <= 0 or max(every) <= LOG_RATIO * min(every):
        return plot
    floor = max(min(every) / 2, min(values) / 50)
    curves = tuple(replace(curve, low=_clamp(curve.low, floor, math.inf)) for curve in plot.curves)
    omitted = any(value < floor for curve in plot.curves for value in finite_values(curve.y))
    note = f"Values below {format_short(float(f'{floor:.1g}'))} are not shown." if omitted else ""
    caption, bottom = join_sentences(plot.caption, note), floor if omitted else None
    return replace(plot, curves=curves, caption=caption, log_y=True, bottom=bottom)


def _clamp(values: tuple[float, ...], low: float, high: float) -> tuple[float, ...]:
    return tuple(min(max(value, low), high) if math.isfinite(value) else value for value in values)


def plot_density(record: dict[str, Any]) -> Plot:
    """Plot the density in a record of `neumann spectrum`.

    The axis starts at a tenth of what a single eigenvalue would show; further down there are only
    the tails of the Gaussians that smooth the density.
    """
    density, about, extremes = record["density"], record["about"], record["extremes"]
    bottom = 1 / (about["parameters"] * density["width"] * math.sqrt(2 * math.pi)) / 10
    y, low, high = (
        tuple(max(value, bottom / 10) for value in density[name])
        for name in ("density", "lower", "upper")
    )
    matrix = MATRICES.get(about["matrix"], str(about["matrix"]))
    label = (
        f"{about['parameters']:,} parameters, {about['examples']:,} examples; band: "
        f"{100 * density['confidence']:g} % over {density['probes']} probes"
    )
    ends = [extremes[name]["value"] for name in ("smallest", "largest")]
    return Plot(
        "density",
        f"Density of the {matrix}'s eigenvalues",
        "share of eigenvalues per unit of λ",
        (Curve(label, 0, "mean", tuple(density["points"]), y, low, high),),
        x_label="eigenvalue λ;  ○  λ min and λ max",
        points=tuple(Point(label, 0, "chosen", value, None) for value in ends),
        log_y=True,
        from_zero=False,
        bottom=bottom,
    )
