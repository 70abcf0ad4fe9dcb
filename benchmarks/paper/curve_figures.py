"""The paper's Figures 1 to 3, 5 and 6 from our runs; a figure without its runs is left out.

A line is the mean over seeds at each epoch, the band around it their range. Figure 4, the extreme
eigenvalues along training, is that of `benchmarks.spectrum.along_training`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.common.ledger import Run
from benchmarks.paper.claim_tests import get_curve, get_score
from benchmarks.paper.length_tests import BATCHES
from benchmarks.paper.run_lines import Results, name_point
from neumann.lab.report.palette import ARMS, GRID, INK, MUTED
from neumann.lab.studies.statistics import mean_interval

ROOM = 4.0  # times the lowest error, the highest that a panel shows
# An arm has the same color in all figures.
COLORS = {
    "neumann": ARMS[0][0],
    "rmsprop": ARMS[1][0],
    "nesterov": ARMS[2][0],
    "no regularizers": ARMS[3][0],
    "no cubic": ARMS[4][0],
    "no repulsion": ARMS[5][0],
    "adam": ARMS[3][0],
    "lars": ARMS[4][0],
    "spectral": ARMS[5][0],
}

Curves = Mapping[str, Sequence[Sequence[float | None]]]  # of all seeds, by epoch, by arm


@dataclass(frozen=True)
class Drawing:
    number: int  # in the paper
    caption: str
    alternative: str  # text for readers who cannot see it
    draw: Callable[[Results], Figure | None]  # None: its runs are missing

    @property
    def file(self) -> str:
        return f"figure-{self.number}.png"


def draw_main_curves(results: Results) -> Figure | None:
    runs = find_runs(results, "main-cifar10", ("neumann", "rmsprop"))
    if len(runs) < 2:
        return None
    figure, (left, right) = make_panels(2)
    plot_curves(
        left, {arm: [run["train_loss_curve"] for run in each] for arm, each in runs.items()}
    )
    left.set_yscale("log")
    style(left, "training loss, nats", "epoch")
    plot_errors(right, runs, room=math.inf)  # with the oscillations early in training
    style(right, "test error, %", "epoch")
    return figure


def draw_all_arms(results: Results) -> Figure | None:
    arms = ("neumann", "nesterov", "rmsprop", "adam")
    sets = {"CIFAR-10": "main-cifar10", "CIFAR-100": "main-cifar100"}
    found = {name: find_runs(results, study, arms) for name, study in sets.items()}
    found = {name: runs for name, runs in found.items() if len(runs) > 1}
    if not found:
        return None
    figure, panels = make_panels(len(found))
    for axes, (name, runs) in zip(panels, found.items(), strict=True):
        plot_errors(axes, runs)
        style(axes, f"{name}: test error, %", "epoch")
    return figure


def draw_scaling(results: Results) -> Figure | None:
    arms = ("neumann", "nesterov", "lars", "spectral")
    by_batch = {
        batch: runs
        for batch in BATCHES
        if (runs := find_runs(results, "scaling", arms, name_point(batch_size=batch)))
    }
    ours = {f"{batch:,}": runs["neumann"] for batch, runs in by_batch.items() if "neumann" in runs}
    if not ours:
        return None
    figure, (left, right) = make_panels(2)
    shades = dict(zip(ours, (color for color, _ in ARMS), strict=False))
    plot_errors(left, ours, shades, room=math.inf)
    style(left, "Neumann: test error by batch, %", "epoch")
    for arm in arms:
        batches, means, halves = [], [], []
        for batch, runs in by_batch.items():
            found = mean_interval([100 - get_score(run) for run in runs.get(arm, ())])
            if found.mean is not None:
                batches.append(batch)
                means.append(found.mean)
                halves.append(0.0 if found.high is None else found.high - found.mean)
        right.errorbar(
            batches,
            means,
            yerr=halves,
            color=COLORS[arm],
            label=arm,
            marker="o",
            markersize=4,
            capsize=2,
        )
    right.set_xscale("log", base=2)
    right.set_xticks(list(by_batch), [f"{batch:,}" for batch in by_batch])
    right.minorticks_off()
    style(right, "test error at the end, %", "batch size")
    return figure


def draw_regularizers(results: Results) -> Figure | None:
    arms = ("neumann", "no regularizers", "no cubic", "no repulsion", "nesterov")
    runs = find_runs(results, "regularizers", arms)
    if len(runs) < 2:
        return None
    figure, (axes,) = make_panels(1)
    plot_errors(axes, runs)
    style(axes, "test error, %", "epoch")
    return figure


def draw_seeds(results: Results) -> Figure | None:
    runs = find_runs(results, "main-cifar10", ("neumann", "rmsprop"))
    if len(runs) < 2:
        return None
    figure, (axes,) = make_panels(1)
    errors = find_errors(runs)
    for arm, curves in errors.items():
        for number, curve in enumerate(curves):
            label = f"{arm}, {len(curves)} runs" if number == 0 else None
            axes.plot(*drop_gaps(curve), color=COLORS[arm], linewidth=0.8, alpha=0.7, label=label)
    limit_height(axes, errors, ROOM)
    style(axes, "test error, %", "epoch")
    return figure


DRAWINGS = (
    Drawing(
        1,
        "Training loss and test error along training, CIFAR-10, as the paper's Figure 1",
        "Two plots over epochs, of training loss and test error, for Neumann and RMSProp",
        draw_main_curves,
    ),
    Drawing(
        2,
        "Test error along training for all optimizers, as Figure 2",
        "Test error over epochs on CIFAR-10 and CIFAR-100 for four optimizers",
        draw_all_arms,
    ),
    Drawing(
        3,
        "Batch sizes, as Figure 3: Neumann along training, and all arms at the end, with 95 % "
        "intervals",
        "Left, test error of Neumann over epochs by batch size; right, final error by batch size",
        draw_scaling,
    ),
    Drawing(
        5,
        "With and without the regularizers at batch 4,096, as Figure 5",
        "Test error over epochs with both regularizers, with one, with none, and for Nesterov SGD",
        draw_regularizers,
    ),
    Drawing(
        6,
        "Every run of Neumann and of RMSProp on CIFAR-10, as Figure 6",
        "Test error over epochs, one line for each seed of Neumann and RMSProp",
        draw_seeds,
    ),
)


# ---------------------------------------------------------------------- curves


def find_runs(
    results: Results, study: str, arms: Sequence[str], point: str = ""
) -> dict[str, list[Run]]:
    """The runs that did not diverge, of the arms that have any."""
    found = {arm: list(results.find(study, arm, point).values()) for arm in arms}
    ended = {arm: [run for run in runs if not run.get("diverged")] for arm, runs in found.items()}
    return {arm: runs for arm, runs in ended.items() if runs}


def find_errors(runs: Mapping[str, Sequence[Run]]) -> Curves:
    return {
        arm: [[None if v is None else 100 - v for v in get_curve(run)] for run in each]
        for arm, each in runs.items()
    }


def plot_errors(
    axes: Axes,
    runs: Mapping[str, Sequence[Run]],
    colors: Mapping[str, str] = COLORS,
    room: float = ROOM,
) -> None:
    errors = find_errors(runs)
    plot_curves(axes, errors, colors)
    limit_height(axes, errors, room)


def plot_curves(axes: Axes, curves: Curves, colors: Mapping[str, str] = COLORS) -> None:
    for arm, seeds in curves.items():
        epochs: list[int] = []
        values: list[list[float]] = []
        for epoch, found in enumerate(zip(*seeds, strict=False), start=1):
            known = [value for value in found if value is not None]
            if known:
                epochs.append(epoch)
                values.append(known)
        axes.plot(epochs, [fmean(v) for v in values], color=colors[arm], label=arm)
        low, high = ([end(v) for v in values] for end in (min, max))
        axes.fill_between(epochs, low, high, color=colors[arm], alpha=0.18, linewidth=0)


def drop_gaps(curve: Sequence[float | None]) -> tuple[list[int], list[float]]:
    known = [(epoch, value) for epoch, value in enumerate(curve, 1) if value is not None]
    return [epoch for epoch, _ in known], [value for _, value in known]


def limit_height(axes: Axes, errors: Curves, room: float) -> None:
    """Show the errors that matter at the end, and not all of the first epochs."""
    known = [v for seeds in errors.values() for seed in seeds for v in seed if v is not None]
    if known and math.isfinite(room):
        axes.set_ylim(0.9 * min(known), min(room * min(known), 1.02 * max(known)))


def make_panels(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(5.0 * count, 3.8), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def style(axes: Axes, title: str, below: str) -> None:
    axes.set_title(title, color=INK, loc="left", fontsize="medium")
    axes.set_xlabel(below, color=INK)
    axes.grid(axis="y", color=GRID)
    axes.tick_params(colors=MUTED)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
