r"""Draw the contest: accuracy against batch size, with confidence intervals.

    python -m benchmarks.contest.draw_figure results/large-batch.json docs/assets/large-batch.png
    python -m benchmarks.contest.draw_figure --small results/large-batch.json \
        results/large-batch.png

Means over the tested seeds with 95 % confidence intervals. A name stands at the right end of its
line. The optimizers of this package are in color. README shows the small figure, 430 pixels wide:
its type is larger, and it names only the forms of this package and the optimizers that the pages
compare them with.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks.common.labels import spread_labels
from benchmarks.contest.image_families import BEST_PEER, OTHER_FORMS
from benchmarks.contest.summary import BatchSummary
from neumann.lab.report.palette import ARMS, GRID, INK, MUTED


@dataclass(frozen=True)
class Layout:
    """How large a figure is, and what it names."""

    inches: tuple[float, float]
    dpi: int
    font: float  # pt
    name_height: float  # of the axes: the least distance between two names
    thickness: float = 1.0  # of lines and markers
    peers: frozenset[str] | None = None  # the other optimizers that have a name; None: all


FOR_PAGES = Layout((7, 4.4), 160, 10, 0.05)
FOR_README = Layout((4.3, 2.7), 300, 9, 0.085, 0.75, frozenset({BEST_PEER, *OTHER_FORMS.values()}))

Curves = dict[str, list[tuple[int, dict[str, Any]]]]  # batch sizes and intervals by optimizer


def draw_contest(summaries: Sequence[BatchSummary], path: Path, layout: Layout = FOR_PAGES) -> None:
    """Draw the rows of one model at all batch sizes."""
    pairs = [(summary["batch"], row) for summary in summaries for row in summary["rows"]]
    ours = sorted({row["entrant"] for _, row in pairs if row["ours"]}, reverse=True)
    colors = {name: color for name, (color, *_) in zip(ours, ARMS, strict=False)}
    curves: Curves = {}
    for batch, row in pairs:
        if row["interval"]["mean"] is not None:
            curves.setdefault(row["entrant"], []).append((batch, row["interval"]))
    with matplotlib.rc_context({"font.size": layout.font}):
        margins = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)  # inches
        figure = Figure(figsize=layout.inches, layout=margins)
        axes = figure.subplots()
        for name in sorted(curves, key=lambda name: name in colors):  # ours on top
            _draw_curve(axes, curves[name], colors.get(name), layout.thickness)
        _label_axes(axes, sorted({batch for points in curves.values() for batch, _ in points}))
        _write_names(axes, curves, colors, layout)
        FigureCanvasAgg(figure)
        figure.savefig(path, dpi=layout.dpi)


def _label_axes(axes: Axes, batches: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set_xlabel("batch size", color=INK)
    axes.set_title("test accuracy, %", color=INK, loc="left", fontsize="medium")
    axes.grid(axis="y", color=GRID)
    axes.tick_params(colors=MUTED, labelsize="medium")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_curve(
    axes: Axes, points: list[tuple[int, dict[str, Any]]], color: str | None, thickness: float
) -> None:
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
        linewidth=thickness * (2.4 if color else 1.1),
        elinewidth=thickness * 1.1,
        marker="o",
        markersize=thickness * (5 if color else 3.5),
        capsize=thickness * 2,
    )


def _write_names(axes: Axes, curves: Curves, colors: Mapping[str, str], layout: Layout) -> None:
    """At the right end of each line, moved apart where they would overlap."""
    bottom, top = axes.get_ylim()
    names = [n for n in curves if layout.peers is None or n in layout.peers or n in colors]
    means = [curves[name][-1][1]["mean"] for name in names]
    heights = spread_labels(means, layout.name_height * (top - bottom))
    # The leader ends just before the middle of the name's left edge.
    leader = {"arrowstyle": "-", "color": MUTED, "alpha": 0.5, "linewidth": layout.thickness * 0.9}
    leader |= {"relpos": (0, 0.5), "shrinkA": 2, "shrinkB": 5}
    for name, mean, height in zip(names, means, heights, strict=True):
        axes.annotate(
            name,
            (curves[name][-1][0], mean),
            xytext=(1.8 * layout.font, height),
            textcoords=("offset points", "data"),
            color=colors.get(name, MUTED),
            weight="bold" if name in colors else "normal",
            va="center",
            annotation_clip=False,
            arrowprops=leader,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("summary", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--small", action="store_true", help="as README shows it")
    arguments = parser.parse_args()
    summaries = json.loads(arguments.summary.read_text())["resnet9"]
    draw_contest(summaries, arguments.picture, FOR_README if arguments.small else FOR_PAGES)


if __name__ == "__main__":
    main()
