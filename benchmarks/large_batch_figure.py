"""The contest in one picture: accuracy against batch size, with its spread.

    python benchmarks/large_batch_figure.py results/large-batch.json results/large-batch.png

Means of the tested seeds with 95 % confidence intervals: all of them, and those at the top once
more, close by. The optimizers of this package are drawn boldly.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from neumann.report.palette import ARMS, GRID, INK, MARKERS, MUTED

CLOSE = (92.8, 95.0)  # %, what the second panel shows
NUDGE = 0.09  # octaves between those that are close, so that intervals do not hide each other

Curves = dict[str, list[tuple[int, dict[str, Any]]]]  # an interval for each batch size


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """The rows of ResNet-9 at all batch sizes."""
    curves: Curves = {}
    ours = set()
    for part in found:
        for row in part["rows"]:
            if row["interval"]["mean"] is None:
                continue
            curves.setdefault(row["entrant"], []).append((part["batch"], row["interval"]))
            if row["ours"]:
                ours.add(row["entrant"])
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    everything, close = figure.subplots(1, 2)
    _panel(everything, curves, ours)
    _panel(close, curves, ours, apart=True)
    everything.set_ylabel("test accuracy, %", color=INK)
    close.set_ylim(*CLOSE)
    close.set_title(f"the same above {CLOSE[0]:g} %", color=INK, loc="left")
    everything.set_title("CIFAR-10, ResNet-9, 24 epochs, tuned alike", color=INK, loc="left")
    close.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=160)


def _panel(axes: Axes, curves: Curves, ours: set[str], apart: bool = False) -> None:
    ranked = sorted(curves, key=lambda name: -curves[name][-1][1]["mean"])
    looks = sorted(ranked, key=lambda name: name not in ours)  # ours have a colour each
    for name in ranked:
        place, points = looks.index(name), curves[name]
        shifts = [_shift(name, batch, ranked, curves) if apart else 1.0 for batch, _ in points]
        means = [interval["mean"] for _, interval in points]
        low, high = (
            [abs((interval[end] or interval["mean"]) - interval["mean"]) for _, interval in points]
            for end in ("low", "high")
        )
        axes.errorbar(
            [batch * shift for (batch, _), shift in zip(points, shifts, strict=True)],
            means,
            yerr=[low, high],
            label=name,
            color=ARMS[place % len(ARMS)][0],
            marker=MARKERS[1 + place % (len(MARKERS) - 1)],
            linewidth=2.4 if name in ours else 1.1,
            linestyle="-" if name in ours else "--",
            elinewidth=1.1,
            markersize=5,
            capsize=2,
        )
    batches = sorted({batch for points in curves.values() for batch, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.minorticks_off()
    axes.set_xlabel("batch size", color=INK)
    axes.grid(color=GRID)
    axes.tick_params(colors=MUTED)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _shift(name: str, batch: int, ranked: list[str], curves: Curves) -> float:
    """The factor that puts those close to each other at a batch size side by side."""
    means = {other: dict(curves[other]).get(batch, {"mean": 0.0})["mean"] for other in ranked}
    close = [other for other in ranked if means[other] >= CLOSE[0]]
    place = close.index(name) - (len(close) - 1) / 2 if name in close else 0.0
    return float(2.0 ** (NUDGE * place))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("summary", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    draw(json.loads(arguments.summary.read_text())["resnet9"], arguments.picture)


if __name__ == "__main__":
    main()
