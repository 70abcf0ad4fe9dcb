"""The contest in one picture: accuracy against batch size, with its spread.

    python benchmarks/large_batch_figure.py results/large-batch.json results/large-batch.png

Means of the tested seeds with 95 % confidence intervals. The optimizers of this package are drawn
boldly; of the others all that have been tested.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from neumann.report.palette import ARMS, GRID, INK, MARKERS, MUTED

LOWEST = 80.0  # %; what lies below is cut
NUDGE = 0.035  # octaves between neighbours, so that intervals do not hide each other


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """The rows of ResNet-9 at all batch sizes."""
    curves: dict[str, list[tuple[int, float, float, float]]] = {}
    ours = set()
    for part in found:
        for row in part["rows"]:
            interval = row["interval"]
            if interval["mean"] is None:
                continue
            low, high = interval["low"], interval["high"]
            mean = interval["mean"]
            point = (
                part["batch"],
                mean,
                mean if low is None else low,
                mean if high is None else high,
            )
            curves.setdefault(row["entrant"], []).append(point)
            if row["ours"]:
                ours.add(row["entrant"])
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    ranked = sorted(curves, key=lambda name: -curves[name][-1][1])
    for place, name in enumerate(ranked):
        points = sorted(curves[name])
        shift = 2.0 ** (NUDGE * (place - len(ranked) / 2))
        means = [point[1] for point in points]
        errors = [
            [point[1] - point[2] for point in points],
            [point[3] - point[1] for point in points],
        ]
        axes.errorbar(
            [point[0] * shift for point in points],
            means,
            yerr=errors,
            label=name,
            color=ARMS[place % len(ARMS)][0],
            marker=MARKERS[1 + place % (len(MARKERS) - 1)],
            linewidth=2.4 if name in ours else 1.1,
            linestyle="-" if name in ours else "--",
            markersize=5,
            capsize=2,
        )
    batches = sorted({point[0] for points in curves.values() for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.minorticks_off()
    lowest = min(point[2] for points in curves.values() for point in points)
    axes.set_ylim(bottom=max(LOWEST, lowest - 0.5))
    axes.set_xlabel("batch size", color=INK)
    axes.set_ylabel("test accuracy, %", color=INK)
    axes.set_title(
        "CIFAR-10, ResNet-9, 24 epochs, each optimizer tuned alike", color=INK, loc="left"
    )
    axes.grid(color=GRID)
    axes.tick_params(colors=MUTED)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=160)


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
