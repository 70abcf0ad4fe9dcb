"""The chart of the result as a PNG, to use elsewhere; the page draws its own."""

import io
import math
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from neumann.lab.report.drawing import FONT, PNG_OPTIONS, ignore_missing_glyphs, make_settings
from neumann.lab.report.formatting import printable
from neumann.lab.report.palette import GRID, INK, MUTED, PAPER, line_style
from neumann.lab.report.result_chart import ChartRow, ResultChart

WIDTH, ROW, MARGIN = 6.0, 0.42, 0.5  # inches
MAX_NAME = 40  # characters


def draw_result(chart: ResultChart) -> bytes:
    height = MARGIN + ROW * len(chart.rows)
    with mpl.rc_context(make_settings("result")), ignore_missing_glyphs():
        figure = Figure(figsize=(WIDTH, height))
        figure.patch.set_facecolor(PAPER)
        axes: Axes = figure.add_axes((0.0, MARGIN / height, 1.0, 1 - MARGIN / height))
        axes.set_xlim(0, 100)
        axes.set_ylim(len(chart.rows) - 0.4, -0.6)
        axes.spines[:].set_visible(False)
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=MUTED, length=0, labelsize=FONT - 1)
        axes.set_xticks([place for place, _ in chart.ticks], [text for _, text in chart.ticks])
        axes.set_yticks(range(len(chart.rows)), [_shorten(row.arm) for row in chart.rows])
        for label in axes.get_yticklabels():
            label.set(color=INK, fontsize=FONT)
        for place, row in enumerate(chart.rows):
            _draw_row(axes, place, row)
        # Above the names, where the picture begins.
        axes.set_title(chart.title, loc="left", fontsize=FONT + 1, color=INK)
        png = io.BytesIO()
        figure.savefig(png, format="png", **PNG_OPTIONS)
    return png.getvalue()


def _draw_row(axes: Axes, place: int, row: ChartRow) -> None:
    color = line_style(row.index).color
    beside: Any = {"color": color, "linestyle": "None", "clip_on": False}
    if row.interval is not None:
        axes.plot(row.interval, [place] * 2, color=color, linewidth=3.5, alpha=0.55, clip_on=False)
    heights = [place + 0.28 + 0.12 * seed.level for seed in row.seeds]
    places = [seed.position for seed in row.seeds]
    axes.plot(places, heights, marker="o", markersize=4, alpha=0.5, markeredgewidth=0, **beside)
    mean = math.nan if row.mean is None else row.mean
    axes.plot([mean], [place], marker="o", markersize=9, markeredgecolor=PAPER, **beside)
    for side in row.beyond:
        at, marker = (0, "<") if side == "left" else (100, ">")
        axes.plot([at], [place], marker=marker, markersize=8, markeredgewidth=0, **beside)
        if row.far:
            axes.annotate(
                row.far,
                (at, place),
                xytext=(8 if at == 0 else -8, 0),
                textcoords="offset points",
                ha="left" if at == 0 else "right",
                va="center",
                color=MUTED,
                fontsize=FONT - 1,
            )
    note = f"  ({row.note})" if row.note else ""
    axes.annotate(
        f"{row.text}{note}",
        (100, place),
        xytext=(14, 0),
        textcoords="offset points",
        va="center",
        color=INK,
        annotation_clip=False,
    )


def _shorten(name: str) -> str:
    text = printable(" ".join(name.split()))
    return text if len(text) <= MAX_NAME else text[: MAX_NAME - 1] + "…"
