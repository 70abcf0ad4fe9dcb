"""Draw the contest: accuracy against batch size, with confidence intervals.

    python -m benchmarks.contest.draw_figure results/large-batch.json results/large-batch.png

Means over the tested seeds with 95 % confidence intervals. The left panel shows all optimizers, the
right one those at the top in detail. Bold lines are optimizers of this package.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.contest.summary import BatchSummary
from neumann.lab.report.palette import ARMS, GRID, INK, MARKERS, MUTED

DETAIL = (92.8, 95.0)  # %, the range of the second panel
SPACING = 0.09  # octaves between neighbors there, so that no interval hides another

Curves = dict[str, list[tuple[int, dict[str, Any]]]]  # batch sizes and intervals by optimizer


def draw_contest(summaries: Sequence[BatchSummary], path: Path) -> None:
    """Draw the rows of one model at all batch sizes."""
    pairs = [(summary["batch"], row) for summary in summaries for row in summary["rows"]]
    ours = {row["entrant"] for _, row in pairs if row["ours"]}
    curves: Curves = {}
    for batch, row in pairs:
        if row["interval"]["mean"] is not None:
            curves.setdefault(row["entrant"], []).append((batch, row["interval"]))
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    overview, detail = figure.subplots(1, 2)
    _draw_panel(overview, curves, ours)
    _draw_panel(detail, curves, ours, spread=True)
    overview.set_ylabel("test accuracy, %", color=INK)
    detail.set_ylim(*DETAIL)
    detail.set_title(f"the same above {DETAIL[0]:g} %", color=INK, loc="left")
    overview.set_title("CIFAR-10, ResNet-9, 24 epochs, tuned alike", color=INK, loc="left")
    detail.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=160)


def _draw_panel(axes: Axes, curves: Curves, ours: set[str], spread: bool = False) -> None:
    ranked = sorted(curves, key=lambda name: -curves[name][-1][1]["mean"])
    styles = sorted(ranked, key=lambda name: name not in ours)  # ours come first: a color each
    for name in ranked:
        style, points = styles.index(name), curves[name]
        shifts = [_spread(name, batch, ranked, curves) if spread else 1.0 for batch, _ in points]
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
            color=ARMS[style % len(ARMS)][0],
            marker=MARKERS[1 + style % (len(MARKERS) - 1)],
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
    axes.spines[["top", "right"]].set_visible(False)


def _spread(name: str, batch: int, ranked: list[str], curves: Curves) -> float:
    """A factor on the batch size that puts the optimizers of the second panel side by side."""
    means = {other: dict(curves[other]).get(batch, {"mean": 0.0})["mean"] for other in ranked}
    shown = [other for other in ranked if means[other] >= DETAIL[0]]
    place = shown.index(name) - (len(shown) - 1) / 2 if name in shown else 0.0
    return float(2.0 ** (SPACING * place))


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
