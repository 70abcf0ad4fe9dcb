"""Plots of training: score, loss and learning rate, Neumann's distance and forces, BatchNorm
recalibration, and sensitivity to the learning rate. A plot without a curve is left out.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from neumann.lab.metrics import ACCURACY, Quantity
from neumann.lab.report.formatting import format_list, format_short, join_sentences
from neumann.lab.report.plot import Axis, Curve, Plot, Point, annotate, average_runs, make_curves
from neumann.lab.report.runs import Reader, Run, Series, finite_values, to_number
from neumann.lab.report.study_records import Sensitivity, Study

LOG_RATIO = 20  # a loss that falls by more than this factor gets a log axis
FORCES = {"repulsive force": "repulsive_force", "attractive force": "cubic_force"}


def plot_score(study: Study, axis: Axis) -> Plot | None:
    """Plot what the runs are scored by, on the evaluated data."""
    metric = study.metric
    plot = _plot_evaluations(study, axis, metric)
    if not plot.curves:
        return None
    target = "" if study.target is None else metric.format_target(study.target)
    plot = replace(plot, target=study.target, target_label=target)
    plot = _focus_on_the_end(plot) if metric.higher_is_better else _use_log_axis(plot)
    return annotate(plot, study.arms, axis)


def plot_metrics(study: Study, axis: Axis) -> list[Plot]:
    """Plot what goes with the score: losses and the learning rate."""
    metric = study.metric
    label = f"loss, {metric.loss_unit}"
    note = "Each point is the mean over the steps since the last."
    read_loss, read_rate = (partial(Run.series, kind="step", name=n) for n in ("train_loss", "lr"))
    train_loss = _plot_runs(study, axis, read_loss, "train-loss", "Training loss", label)
    rate = _plot_runs(study, axis, read_rate, "learning-rate", "Learning rate", "learning rate")
    plots = [
        *(_use_log_axis(_plot_evaluations(study, axis, each)) for each in metric.plotted),
        replace(_use_log_axis(train_loss), caption=note),
        _name_equal_curves(_separate_rates(rate)),
    ]
    return [annotate(plot, study.arms, axis) for plot in plots if plot.curves]


def _plot_evaluations(study: Study, axis: Axis, quantity: Quantity) -> Plot:
    on = "held-out data" if study.settings.get("held_out") else "the test set"
    title, name = f"{quantity.name.capitalize()} on {on}", quantity.key.replace("_", "-")
    read = partial(Run.series, kind="epoch", name=quantity.key)
    return _plot_runs(study, axis, read, name, title, quantity.label)


def _plot_runs(study: Study, axis: Axis, read: Reader, name: str, title: str, label: str) -> Plot:
    """Plot a recorded number of every arm."""
    curves = tuple(curve for arm in study.arms for curve in make_curves(arm, axis, read))
    return Plot(f"{name}-{axis}", title, label, curves)


def plot_recalibration(study: Study, axis: Axis) -> Plot | None:
    """Plot accuracy with the running BatchNorm statistics and with recalibrated ones."""
    curves: list[Curve] = []
    for arm in study.arms:
        read = partial(Run.series, kind="epoch", name="accuracy_recalibrated")
        if recalibrated := average_runs(arm, axis, read, "recalibrated"):
            read = partial(Run.series, kind="epoch", name="accuracy")
            curves += average_runs(arm, axis, read, "plain") + recalibrated
    if not curves:
        return None
    plot = Plot(
        "recalibrated",
        "Accuracy with BatchNorm recalibrated",
        "accuracy, %",
        tuple(curves),
        "Solid: with the statistics gathered during training. Dashed: gathered again at the "
        "evaluated weights.",
    )
    return annotate(_focus_on_the_end(plot), study.arms, axis)


def plot_forces(study: Study, axis: Axis) -> list[Plot]:
    """Plot what moves Neumann besides the gradient: r = ‖w − v‖ and the two forces."""
    distance = [curve for arm in study.arms for curve in make_curves(arm, axis, _read_distance)]
    forces = [
        curve
        for arm in study.arms
        for part, name in FORCES.items()
        for curve in average_runs(arm, axis, _force_reader(name), part)
    ]
    of_distance = "During the warm-up the average stays at the initial weights."
    of_forces = (
        "Solid: repulsion β·r/R³. Dashed: attraction α·r². Both are shown as they would be at the "
        "current distance; they act between resets, not during the warm-up."
    )
    title = "Distance from the average, r = ‖w − v‖"
    plots = [
        Plot("distance", title, "r", _keep_positive(distance), of_distance, log_y=True),
        Plot(
            "forces",
            "Repulsion and attraction",
            "force",
            _keep_positive(forces),
            of_forces,
            log_y=True,
        ),
    ]
    return [annotate(plot, study.arms, axis) for plot in plots if plot.curves]


def plot_sensitivity(sensitivities: Sequence[Sensitivity], held_out: bool) -> Plot | None:
    """Plot the score against the learning rate, with the chosen rates and those that diverged."""
    curves, points = [], []
    for arm in sensitivities:
        ends = [
            (trial.lr, trial.mean, min(trial.scores), max(trial.scores))
            for trial in arm.trials
            if trial.mean is not None
        ]
        if ends:
            curves.append(Curve(arm.arm, arm.index, "mean", *zip(*ends, strict=True)))
        failed = [trial.lr for trial in arm.trials if trial.diverged]
        points += [Point(arm.arm, arm.index, "diverged", lr, None) for lr in failed]
        best = arm.best
        if arm.chosen is not None and best is not None and best.mean is not None:
            points.append(Point(arm.arm, arm.index, "chosen", best.lr, best.mean))
    if not curves and not points:
        return None
    metric = sensitivities[0].metric
    bottom, note = None, ""
    if metric is ACCURACY:
        bottom, note = _focus_on_the_best(sensitivities)
    end = "bottom" if metric.higher_is_better else "top"
    seeds = "Each point is the mean over the seeds; each bar spans the lowest to the highest seed."
    meanings = {
        "chosen": "Circled: the chosen learning rate.",
        "diverged": f"×\u00a0at the {end}: a run diverged at that learning rate.",
    }
    parts = {point.part for point in points}
    rates = {trial.lr for arm in sensitivities for trial in arm.trials}
    return Plot(
        "lr-sensitivity",
        "Sensitivity to the learning rate",
        f"{metric.name} on {'held-out data' if held_out else 'the test set'}, {metric.unit}",
        tuple(curves),
        join_sentences(
            seeds if any(curve.has_band for curve in curves) else "",
            *(meaning for part, meaning in meanings.items() if part in parts),
            note,
        ),
        "learning rate",
        points=tuple(points),
        log_x=min(rates) > 0,
        from_zero=False,
        ticks=tuple(sorted(rates)),
        separate=True,
        bottom=bottom,
        low_is_good=not metric.higher_is_better,
    )


def _read_distance(run: Run) -> Series:
    return {step: to_number(report.get("distance")) for step, report in run.reports}


def _force_reader(name: str) -> Reader:
    """Return a function that reads a force of the first parameter group that has one."""

    def read(run: Run) -> Series:
        series = {}
        for step, report in run.reports:
            if isinstance(groups := report.get("groups"), list):
                force = next((group[name] for group in groups if name in group), None)
                series[step] = to_number(force)
        return series

    return read


def _keep_positive(curves: Sequence[Curve]) -> tuple[Curve, ...]:
    """Replace values that a log axis cannot show by gaps; drop curves that have no others."""

    def cut(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value if value > 0 else math.nan for value in values)

    positive = [replace(c, y=cut(c.y), low=cut(c.low), high=cut(c.high)) for c in curves]
    return tuple(curve for curve in positive if not curve.is_empty)


def _focus_on_the_end(plot: Plot) -> Plot:
    """Start the accuracy axis where the last three quarters of the runs can be read.

    An arm that rises late would squeeze the ends of all others into one line. So of several arms, a
    quarter of these values may be cut off, but never where an arm ends.
    """
    healthy = [curve for curve in plot.curves if curve.part != "diverged"]
    lows = [finite_values(curve.low) for curve in healthy]
    values = [low for of_curve in lows for low in of_curve]
    late = sorted(low for curve in healthy for low in _list_late(curve))
    if late and len({curve.label for curve in healthy}) > 1:
        ends = [of_curve[-1] for of_curve in lows if of_curve]
        floor = min(late[len(late) // 4], *ends)
        late = [low for low in late if low >= floor]
    if late and plot.target is not None and plot.target >= 2 * late[0] - max(values):
        late.append(plot.target)  # it is near, as drawing.py has it
    bottom, note = _choose_bottom(values, late)
    return replace(plot, bottom=bottom, caption=join_sentences(plot.caption, note))


def _list_late(curve: Curve) -> list[float]:
    """List the lower edge of a curve in the last three quarters of its length."""
    end = max(finite_values(curve.x), default=0.0)
    edge = zip(curve.x, curve.low, strict=True)
    return finite_values(low for x, low in edge if x > 0.25 * end)


def _focus_on_the_best(sensitivities: Sequence[Sensitivity]) -> tuple[float | None, str]:
    means = [[t.mean for t in arm.trials if t.mean is not None] for arm in sensitivities]
    worst = min((max(of_arm, default=0.0) for of_arm in means), default=0.0)
    # A trial with ten times the error of the worst arm at its best is not worth its space.
    floor = 100 - 10 * (100 - worst)
    lows = [min(t.scores) for arm in sensitivities for t in arm.trials if t.scores]
    return _choose_bottom(lows, [low for low in lows if low >= floor])


def _use_log_axis(plot: Plot) -> Plot:
    """Use a log axis if the values are positive and far apart."""
    values = [value for curve in plot.curves for value in finite_values(curve.low)]
    far_apart = values and min(values) > 0 and max(values) > LOG_RATIO * min(values)
    return replace(plot, log_y=True) if far_apart else plot


def _separate_rates(plot: Plot) -> Plot:
    """Use a log axis if the arms' learning rates are far apart."""
    peaks = [max(finite_values(curve.y), default=0.0) for curve in plot.curves]
    peaks = [peak for peak in peaks if peak > 0]
    if len(peaks) < 2 or max(peaks) <= 5 * min(peaks):
        return plot
    bottom = 10.0 ** math.floor(math.log10(min(peaks) / 20))
    if all(value >= bottom for curve in plot.curves for value in finite_values(curve.y)):
        return replace(plot, log_y=True)
    note = f"Values below {format_short(bottom)} are not shown."
    return replace(plot, log_y=True, bottom=bottom, caption=note)


def _name_equal_curves(plot: Plot) -> Plot:
    """Say which arms have the same curve, as the last of them hides the others."""
    sharing: dict[tuple[tuple[float, ...], ...], list[str]] = {}
    for curve in plot.curves:
        if curve.part != "diverged":
            sharing.setdefault((curve.x, curve.y), []).append(curve.label)
    drawn = {curve.label for curve in plot.curves}
    notes = [
        f"{'All arms' if len(arms) == len(drawn) > 2 else format_list(arms)} have the same curve."
        for arms in sharing.values()
        if len(arms) > 1
    ]
    return replace(plot, caption=join_sentences(plot.caption, *notes))


def _choose_bottom(values: Sequence[float], wanted: Sequence[float]) -> tuple[float | None, str]:
    """Choose where an accuracy axis starts so that the wanted values can be told apart.

    Returns the start, None if all values fit well, and a sentence for the caption.
    """
    if not wanted or max(values) == min(wanted):
        return None, ""
    bottom = min(wanted) - 0.06 * (max(values) - min(wanted))
    if min(values) >= bottom - (max(values) - bottom):
        return None, ""
    return bottom, f"The axis starts at {bottom:.3g} %; lower values are not shown."
