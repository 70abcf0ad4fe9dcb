"""Plots drawn with matplotlib: an SVG for the page and a PNG for elsewhere.

Through the object-oriented interface, with no global figure, and with ids that depend on the plot
alone, so that equal records give equal files. The SVG has no legend, since the page has one that
wraps on a phone; the PNG has title and legend. Text is never read as mathematics.
"""

import io
import math
import warnings
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from neumann.report import decoration
from neumann.report.curves import Curve
from neumann.report.decoration import FONT
from neumann.report.markup import readable
from neumann.report.palette import HOLLOW, INK, PAPER, PARTS, WIDTH, Style, style_of
from neumann.report.plots import Plot
from neumann.report.svg import Named, embedded

SIZE = (6.0, 3.9)  # inches; 72 units of the SVG each
MARGINS = {"left": 0.135, "right": 0.985, "top": 0.925, "bottom": 0.145}
PNG_DPI = 160


@dataclass(frozen=True)
class Picture:
    """One plot, drawn twice."""

    svg: Element
    png: bytes


def draw(plot: Plot) -> Picture:
    """The plot for the page and as a file."""
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": plot.name,
        "font.size": FONT,
        "font.family": "sans-serif",
        "axes.unicode_minus": True,
        "text.parse_math": False,
        "path.simplify": True,
    }
    with mpl.rc_context(settings), warnings.catch_warnings():
        # Names may hold characters that no font here has; they are right on the page.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure, names = _figure(plot)
        text = io.BytesIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        label = f"{plot.title}: {plot.y_label} against {plot.x_label}"
        svg = embedded(text.getvalue().decode(), plot.name, label, names)
        # The same figure goes on to be the PNG, which has to explain itself.
        _legend(figure, plot)
        figure.axes[0].set_title(plot.title, loc="left", fontsize=FONT + 1, color=INK, pad=20)
        picture = io.BytesIO()
        figure.savefig(
            picture,
            format="png",
            dpi=PNG_DPI,
            facecolor="white",
            bbox_inches="tight",
            metadata={"Software": None},
        )
    return Picture(svg, picture.getvalue())


def _figure(plot: Plot) -> tuple[Figure, dict[str, Named]]:
    figure = Figure(figsize=SIZE)
    figure.subplots_adjust(**MARGINS)  # the same for all, so that axes line up
    figure.patch.set_visible(False)
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    names: dict[str, Named] = {}
    if plot.log_x:
        axes.set_xscale("log")
    if plot.log_y:
        axes.set_yscale("log", nonpositive="mask")
    for index, curve in enumerate(plot.curves):
        _curve(axes, plot, curve, index, names)
    decoration.limits(axes, plot)
    decoration.marks(axes, plot, names)
    decoration.spots(axes, plot, names)
    if plot.target is not None:
        decoration.target(axes, plot.target)
    decoration.dress(axes, plot)
    return figure, names


def _curve(axes: Axes, plot: Plot, curve: Curve, index: int, names: dict[str, Named]) -> None:
    style = style_of(curve.place, curve.part)
    lone = sum(math.isfinite(value) for value in curve.y) == 1
    marker = "o" if lone or plot.points else style.marker
    diverged = curve.part == "diverged"
    if curve.spread:
        if plot.points:
            bars: Any = axes.vlines(curve.x, curve.low, curve.high, colors=style.colour, alpha=0.55)
            bars.set_linewidth(2.6)
        else:
            bars = axes.fill_between(
                curve.x, curve.low, curve.high, color=style.colour, alpha=0.16, linewidth=0
            )
        bars.set_gid(f"band-{index}")
        names[f"band-{index}"] = Named(curve.label, "spread")
    hollow = curve.part == HOLLOW
    every = plot.points or lone or hollow
    (line,) = axes.plot(
        curve.x,
        curve.y,
        color=style.colour,
        linewidth=0.9 if diverged else WIDTH,
        alpha=0.8 if diverged else 1.0,
        linestyle="None" if hollow else _dashes(style),
        marker="o" if hollow else marker or "None",
        markerfacecolor=PAPER if hollow else None,
        markersize=5 if every else 4,
        markevery=None if every else max(len(curve.x) // 8, 1),
        solid_capstyle="round",
        zorder=3 + 0.01 * curve.place + hollow,  # dashes show on what is solid
    )
    line.set_gid(f"curve-{index}")
    names[f"curve-{index}"] = Named(curve.label, curve.part)


def _legend(figure: Figure, plot: Plot) -> None:
    """Below the axes: each arm once, then what line styles mean."""
    handles: list[Line2D] = []
    labels: list[str] = []
    for curve in plot.curves:
        style = style_of(curve.place, curve.part)
        named = f"{curve.label}: {curve.part}" if curve.part in PARTS else curve.label
        text = readable(" ".join(named.split()))
        text = text if len(text) <= 70 else text[:69] + "…"
        if text not in labels:
            labels.append(text)
            handles.append(
                Line2D(
                    [],
                    [],
                    color=style.colour,
                    linewidth=WIDTH,
                    linestyle="None" if curve.part == HOLLOW else _dashes(style),
                    marker="o" if plot.points or curve.part == HOLLOW else style.marker or "None",
                    markerfacecolor=PAPER if curve.part == HOLLOW else None,
                    markersize=5,
                )
            )
    longest = max((len(label) for label in labels), default=0)
    legend = figure.legend(
        handles,
        [f"\u200b{label}" if label.startswith("_") else label for label in labels],
        loc="upper left",
        bbox_to_anchor=(MARGINS["left"] - 0.02, 0.0),
        ncols=1 if longest > 32 else 2 if longest > 18 else 3,
        frameon=False,
        fontsize=FONT - 1.5,
        labelcolor=INK,
        handlelength=3,
    )
    for text_object in legend.get_texts():
        text_object.set_parse_math(False)


def _dashes(style: Style) -> Any:
    return (0, style.dashes) if style.dashes else "-"
