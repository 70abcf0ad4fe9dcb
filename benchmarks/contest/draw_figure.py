"""Draw the contest: accuracy against batch size, with confidence intervals.

    python -m benchmarks.contest.draw_figure results/large-batch.json results/large-batch.png

Means over the tested seeds with 95 % confidence intervals. A name stands at the right end of its
line. The optimizers of this package are in color.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.common.labels import spread_labels
from benchmarks.contest.summary import BatchSummary
from neumann.lab.report.palette import ARMS, GRID, INK, MUTED

NAME_HEIGHT = 0.05  # of the axes: the least distance between two names

Curves = dict[str, list[tuple[int, dict[str, Any]]]]  # batch sizes and intervals by optimizer


def draw_contest(summaries: Sequence[BatchSummary], path: Path) -> None:
    """Draw the rows of one model at all batch sizes."""
    pairs = [(summary["batch"], row) for summary in summaries for row in summary["rows"]]
    ours = sorted({row["entrant"] for _, row in pairs if row["ours"]}, reverse=True)
    colors = {name: color for name, (color, *_) in zip(ours, ARMS, strict=False)}
    curves: Curves = {}
    for batch, row in pairs:
        if row["interval"]["mean"] is not None:
            curves.setdefault(row["entrant"], []).append((batch, row["interval"]))
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.subplots()
    for name in sorted(curves, key=lambda name: name in colors):  # ours on top
        _draw_curve(axes, curves[name], colors.get(name))
    batches = sorted({batch for points in curves.values() for batch, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.minorticks_off()
    axes.set_xlabel("batch size", color=INK)
    axes.set_title("test accuracy, %", color=INK, loc="left", fontsize="medium")
    axes.grid(axis="y", color=GRID)
    axes.tick_params(colors=MUTED)
    axes.spines[["top", "right"]].set_visible(False)
    _write_names(axes, curves, colors)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=160)


def _draw_curve(axes: Axes, points: list[tuple[int, dict[str, Any]]], color: str | None) -> None:
    means = [interval["mean"] for _, interval in points]
    low, high = (
        [abs((interval[end] or interval["mean"]) - interval["mean"]) for _, interval in points]
        for end in ("low", "high")
    )
    axes.errorbar(
        [batch for batch, _ in points],
        means,
        yerr=[low, high],
        color=color or MUTED,
        alpha=1.0 if color else 0.6,
        linewidth=2.4 if color else 1.1,
        elinewidth=1.1,
        marker="o",
        markersize=5 if color else 3.5,
        capsize=2,
    )


def _write_names(axes: Axes, curves: Curves, colors: Mapping[str, str]) -> None:
    """At the right end of each line, moved apart where they would overlap."""
    bottom, top = axes.get_ylim()
    gap = NAME_HEIGHT * (top - bottom)
    heights = spread_labels([points[-1][1]["mean"] for points in curves.values()], gap)
    last = max(batch for points in curves.values() for batch, _ in points)
    for name, height in zip(curves, heights, strict=True):
        batch, interval = curves[name][-1]
        axes.annotate(
            name,
            (batch, interval["mean"]),
            xytext=(last * 1.16, height),
            color=colors.get(name, MUTED),
            weight="bold" if name in colors else "normal",
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": GRID, "shrinkA": 0, "shrinkB": 4},
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("summary", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    draw_contest(json.loads(arguments.summary.read_text())["resnet9"], arguments.picture)


if __name__ == "__main__":
    main()
