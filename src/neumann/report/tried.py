"""The plot of a sweep: accuracy against the learning rate, what was chosen and what diverged."""

from collections.abc import Sequence

from neumann.report.curves import Curve
from neumann.report.plots import Plot, Spot, begin
from neumann.report.sensitivity import Sensitivity


def sensitivity_plot(found: Sequence[Sensitivity], held_out: bool) -> Plot | None:
    """Accuracy against the learning rate."""
    curves, spots = [], []
    for each in found:
        ended = [trial for trial in each.trials if trial.mean is not None]
        curve = Curve(
            each.arm,
            each.place,
            "mean",
            tuple(trial.lr for trial in ended),
            tuple(trial.mean or 0.0 for trial in ended),
            tuple(min(trial.accuracies) for trial in ended),
            tuple(max(trial.accuracies) for trial in ended),
        )
        curves += [curve] if ended else []
        spots += [
            Spot(each.arm, each.place, "diverged", trial.lr, None)
            for trial in each.trials
            if trial.diverged
        ]
        best = each.best
        if each.chosen is not None and best is not None and best.mean is not None:
            spots.append(Spot(each.arm, each.place, "chosen", best.lr, best.mean))
    if not curves and not spots:
        return None
    lowest, note = _lowest_of_interest(found)
    sentences = [
        "Each point is the mean over the seeds, each bar reaches from the lowest to the highest."
        if any(curve.spread for curve in curves)
        else "",
        "Ringed: the learning rate that was chosen."
        if any(spot.part == "chosen" for spot in spots)
        else "",
        "× at the foot: a run diverged at that learning rate."
        if any(spot.part == "diverged" for spot in spots)
        else "",
        note,
    ]
    return Plot(
        "lr-sensitivity",
        "Sensitivity to the learning rate",
        "learning rate",
        f"accuracy on {'held-out data' if held_out else 'the test set'}, %",
        tuple(curves),
        " ".join(sentence for sentence in sentences if sentence),
        spots=tuple(spots),
        log_x=all(trial.lr > 0 for each in found for trial in each.trials),
        from_zero=False,
        ticks=tuple(sorted({trial.lr for each in found for trial in each.trials})),
        points=True,
        bottom=lowest,
    )


def _lowest_of_interest(found: Sequence[Sensitivity]) -> tuple[float | None, str]:
    means = [trial.mean for each in found for trial in each.trials if trial.mean is not None]
    best = [max((t.mean for t in each.trials if t.mean is not None), default=0.0) for each in found]
    # Ten times the error of the worst arm at its best is far away from any choice.
    floor = 100 - 10 * (100 - min(best, default=0.0))
    lows = [min(t.accuracies) for each in found for t in each.trials if t.accuracies]
    return begin(lows, [low for low in lows if low >= floor]) if means else (None, "")
