"""Accuracy, loss and learning rate of a study against epochs, steps or seconds."""

import math
from collections.abc import Callable
from dataclasses import replace

from neumann.report import wording
from neumann.report.curves import AXES, Axis, Curve, arm_curves
from neumann.report.plots import Plot, dressed, finite, focus
from neumann.report.runs import Run, Track
from neumann.report.studies import Study

RATIO = 20  # a loss that falls further than this is drawn on a log axis


def metric_plots(study: Study, axis: Axis) -> list[Plot]:
    """Accuracy and loss on the evaluated data, and the loss in training."""
    evaluated = "held-out data" if study.settings.get("held_out") else "the test set"
    made = []
    accuracy = _curves(study, axis, lambda run: run.track("epoch", "accuracy"))
    bottom, note = focus(accuracy)
    made.append(
        Plot(
            f"accuracy-{axis}",
            f"Accuracy on {evaluated}",
            AXES[axis],
            "accuracy, %",
            accuracy,
            note,
            bottom=bottom,
            target=study.target,
        )
    )
    for name, title, label, of in (
        ("loss", f"Loss on {evaluated}", "loss, nats", lambda run: run.track("epoch", "loss")),
        (
            "train-loss",
            "Loss in training",
            "loss, nats",
            lambda run: run.track("step", "train_loss"),
        ),
    ):
        curves = _curves(study, axis, of)
        caption = (
            "Each point is the mean of the steps since the one before." if "train" in name else ""
        )
        plot = Plot(f"{name}-{axis}", title, AXES[axis], label, curves, caption)
        made.append(_with_log(plot))
    made.append(_schedule(study, axis))
    return [dressed(plot, study.arms, axis) for plot in made if plot.curves]


def recalibration_plot(study: Study) -> Plot | None:
    """Accuracy with the running BatchNorm statistics and with recalibrated ones."""
    curves: list[Curve] = []
    for arm in study.arms:
        recalibrated = arm_curves(
            arm, "epochs", lambda run: run.track("epoch", "accuracy_recalibrated"), "recalibrated"
        )
        sound = [curve for curve in recalibrated if curve.part == "recalibrated"]
        if sound:
            plain = arm_curves(arm, "epochs", lambda run: run.track("epoch", "accuracy"), "plain")
            curves += [curve for curve in plain if curve.part == "plain"] + sound
    if not curves:
        return None
    bottom, note = focus(curves)
    plot = Plot(
        "recalibrated",
        "Accuracy with BatchNorm recalibrated",
        AXES["epochs"],
        "accuracy, %",
        tuple(curves),
        f"Solid: with the statistics gathered in training. Dashed: gathered anew at the weights "
        f"that are evaluated. {note}",
        bottom=bottom,
    )
    return dressed(plot, study.arms, "epochs")


def _schedule(study: Study, axis: Axis) -> Plot:
    """The learning rate, as recorded; a log axis where the arms' are far apart."""
    curves = _curves(study, axis, lambda run: run.track("step", "lr"))
    plot = Plot(f"learning-rate-{axis}", "Learning rate", AXES[axis], "learning rate", curves, "")
    peaks = [peak for curve in curves if (peak := max(finite(curve.y), default=0.0)) > 0]
    if len(peaks) < 2 or max(peaks) <= 5 * min(peaks):
        return plot
    bottom = 10.0 ** math.floor(math.log10(min(peaks) / 20))
    below = any(value < bottom for curve in curves for value in finite(curve.y))
    note = f"Values below {wording.short(bottom)} are not shown." if below else ""
    return replace(plot, log_y=True, bottom=bottom, caption=note)


def _curves(study: Study, axis: Axis, of: Callable[[Run], Track]) -> tuple[Curve, ...]:
    return tuple(curve for arm in study.arms for curve in arm_curves(arm, axis, of))


def _with_log(plot: Plot) -> Plot:
    values = [value for curve in plot.curves for value in finite(curve.low)]
    if values and min(values) > 0 and max(values) > RATIO * min(values):
        return replace(plot, log_y=True)
    return plot
