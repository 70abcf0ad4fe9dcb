"""Plots drawn with matplotlib: an SVG for the page and a PNG to use elsewhere.

Equal records give equal files: there is no global figure, and ids depend only on the plot. The page
has a title and a legend around the SVG; the PNG has its own. Text is never read as mathematics.
"""

import io
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from neumann.lab.report.formatting import format_power, format_short, printable
from neumann.lab.report.palette import GRID, INK, MUTED, PAPER, PARTS, SHADE, WIDTH, line_style
from neumann.lab.report.plot import Curve, PhaseMarks, Plot
from neumann.lab.report.runs import finite_values
from neumann.lab.report.svg import embed_svg

SIZE = (6.0, 3.9)  # inches; 72 units of the SVG each
MARGINS = {"left": 0.155, "right": 0.985, "top": 0.925, "bottom": 0.16}
FONT = 12.0  # units of the SVG
PHONE_FONT = 13.5  # what style.css makes of it on a phone, where pictures are small
# Less compression than usual: it saves more time than the chart of the result takes.
PNG_OPTIONS: Any = {"dpi": 160, "bbox_inches": "tight", "metadata": {"Software": None}}
PNG_OPTIONS |= {"pil_kwargs": {"compress_level": 3}}
DODGE = 0.012  # between arms with the same x, of the width
MAX_LABEL = 70  # characters of a name in the PNG's legend
# Room for the labels under the axis, in units of the SVG. A page's font is wider than most.
LETTER, LABEL_GAP = 0.62 * PHONE_FONT, 8.0


@dataclass(frozen=True)
class Picture:
    svg: str  # markup for the page
    png: bytes


def make_settings(name: str) -> Any:
    """Return matplotlib's settings for a picture of this name."""
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.size": FONT,
        "font.family": "sans-serif",
        "axes.unicode_minus": True,
        "text.parse_math": False,
        "path.simplify": True,
    }


@contextmanager
def ignore_missing_glyphs() -> Iterator[None]:
    """Ignore that the PNG's font may lack characters of a name; the page shows them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def draw(plot: Plot) -> Picture:
    with mpl.rc_context(make_settings(plot.name)), ignore_missing_glyphs():
        canvas = _Canvas(plot)
        svg = io.BytesIO()
        canvas.figure.savefig(svg, format="svg", metadata={"Date": None})
        label = f"{plot.title}: {plot.y_label} against {plot.x_label}"
        markup = embed_svg(svg.getvalue().decode(), plot.name, label, canvas.groups)
        canvas.prepare_for_png()
        png = io.BytesIO()
        canvas.figure.savefig(png, format="png", **PNG_OPTIONS)
    return Picture(markup, png.getvalue())


class _Canvas:
    """A figure with one plot, and the names of what was drawn."""

    def __init__(self, plot: Plot) -> None:
        self.plot = plot
        self.groups: dict[str, tuple[str, str]] = {}  # arm and part by id in the SVG
        self.figure = Figure(figsize=SIZE)
        self.figure.subplots_adjust(**MARGINS)  # the same for all, so that axes line up
        self.figure.patch.set_visible(False)
        self.axes: Axes = self.figure.add_subplot()
        self.axes.patch.set_visible(False)
        if plot.log_x:
            self.axes.set_xscale("log")
        if plot.log_y:
            self.axes.set_yscale("log", nonpositive="mask")
        for index, curve in enumerate(plot.curves):
            self._draw_curve(index, curve)
        _set_limits(self.axes, plot)
        if len(plot.phases) == 1:
            self._shade_phases(plot.phases[0])
        else:
            for index, marks in enumerate(plot.phases):
                self._draw_phases_at_bottom(index, marks)
        self._draw_points()
        self._draw_target()
        _style_axes(self.axes, plot)

    def _name(self, artist: Artist, id_: str, curve: str, part: str) -> None:
        artist.set_gid(id_)
        self.groups[id_] = curve, part

    def _draw_curve(self, index: int, curve: Curve) -> None:
        style = line_style(curve.index, curve.part)
        diverged = curve.part == "diverged"
        every_point = self.plot.separate or style.hollow or len(finite_values(curve.y)) == 1
        x = self._dodge(index, curve.x) if self.plot.dodge else curve.x
        if curve.has_band:
            band: Artist
            edges = x, curve.low, curve.high
            if self.plot.separate:
                band = self.axes.vlines(*edges, colors=style.color, alpha=0.55, linewidth=2.6)
            else:
                band = self.axes.fill_between(*edges, color=style.color, alpha=0.16, linewidth=0)
            self._name(band, f"band-{index}", curve.label, "spread")
        (line,) = self.axes.plot(
            x,
            curve.y,
            linewidth=0.9 if diverged else WIDTH,
            alpha=0.8 if diverged else 1.0,
            markersize=5 if every_point else 4,
            markevery=None if every_point else max(len(curve.x) // 8, 1),
            solid_capstyle="round",
            zorder=3 + 0.01 * curve.index + style.hollow,  # later arms lie on top
            **style.line_options(dots=every_point),
        )
        self._name(line, f"curve-{index}", curve.label, curve.part)

    def _dodge(self, index: int, x: tuple[float, ...]) -> tuple[float, ...]:
        """Move the points of an arm a little aside, so that its bars do not hide another's."""
        xs = finite_values(x for curve in self.plot.curves for x in curve.x)
        low, high = min(xs), max(xs)
        step = DODGE * (index - (len(self.plot.curves) - 1) / 2)
        if self.plot.log_x:
            return tuple(value * (high / low) ** step for value in x)
        return tuple(value + step * (high - low) for value in x)

    def _shade_phases(self, marks: PhaseMarks) -> None:
        """Mark the one timetable across the whole plot."""
        label, across = ", ".join(marks.labels), self.axes.get_xaxis_transform()
        if marks.warmup > 0:
            shade = self.axes.axvspan(0, marks.warmup, color=SHADE, linewidth=0, zorder=0)
            self._name(shade, "warmup-0", label, "warm-up")
            self._write("warm-up", (marks.warmup, 1), across, (-2, 1))
        if marks.resets:
            how: Any = {"colors": MUTED, "linewidth": 0.9, "linestyles": (0, (2, 2)), "zorder": 1}
            lines = self.axes.vlines(marks.resets, 0, 1, transform=across, **how)
            self._name(lines, "resets-0", label, "resets")
            last = marks.resets[-1]
            side = 2 if last < 0.85 * self.axes.get_xlim()[1] else -2
            self._write("reset", (last, 1), across, (side, 1))

    def _draw_phases_at_bottom(self, index: int, marks: PhaseMarks) -> None:
        """Mark one of several timetables in the color of its arm."""
        label, height = ", ".join(marks.labels), 0.012 + 0.022 * index
        color, across = line_style(marks.index).color, self.axes.get_xaxis_transform()
        if marks.warmup > 0:
            ends, heights = [0, marks.warmup], [height] * 2
            how: Any = {"linewidth": 2.5, "alpha": 0.6, "solid_capstyle": "butt"}
            (bar,) = self.axes.plot(ends, heights, color=color, transform=across, **how)
            self._name(bar, f"warmup-{index}", label, "warm-up")
        if marks.resets:
            heights = [height] * len(marks.resets)
            how = {"marker": "|", "markersize": 9, "markeredgewidth": 1.6, "linestyle": "None"}
            (ticks,) = self.axes.plot(marks.resets, heights, color=color, transform=across, **how)
            self._name(ticks, f"resets-{index}", label, "resets")

    def _write(self, text: str, at: Any, coordinates: Any, offset: tuple[int, int]) -> Annotation:
        """Write next to a point, an offset in points to its right or left."""
        return self.axes.annotate(
            text,
            at,
            xycoords=coordinates,
            ha="left" if offset[0] > 0 else "right",
            va="bottom",
            xytext=offset,
            textcoords="offset points",
            fontsize=FONT - 1.5,
            color=MUTED,
        )

    def _draw_points(self) -> None:
        stacked = Counter[float]()  # points at the bad end, by x
        for index, point in enumerate(self.plot.points):
            at_end, diverged = point.y is None, point.part == "diverged"
            inside = 0.03 + 0.05 * stacked[point.x]
            end = 1 - inside if self.plot.low_is_good else inside
            y = end if point.y is None else point.y
            stacked[point.x] += at_end
            (marker,) = self.axes.plot(
                [point.x],
                [y],
                transform=self.axes.get_xaxis_transform() if at_end else self.axes.transData,
                marker="x" if diverged else "o",
                markersize=8 if diverged else 12,
                markeredgewidth=2,
                markeredgecolor=line_style(point.index).color,
                markerfacecolor="none",
                linestyle="None",
                clip_on=not at_end,
                zorder=5,
            )
            self._name(marker, f"spot-{index}", point.label, point.part)

    def _draw_target(self) -> None:
        target, (low, high) = self.plot.target, self.axes.get_ylim()
        if target is not None and low < target < high:
            self.axes.axhline(target, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
            label = f"target {self.plot.target_label}"
            text = self._write(label, (0, target), self.axes.get_yaxis_transform(), (4, 3))
            # Curves may pass behind it, not over it.
            text.set_bbox({"facecolor": PAPER, "edgecolor": "none", "pad": 1.5})
            text.set_zorder(6)

    def prepare_for_png(self) -> None:
        """Give the figure what the page has around it: a title, a background and a legend."""
        self.axes.set_title(self.plot.title, loc="left", fontsize=FONT + 1, color=INK, pad=20)
        self.figure.patch.set_visible(True)
        self.figure.patch.set_facecolor(PAPER)
        handles: dict[str, Line2D] = {}
        for curve in self.plot.curves:
            style = line_style(curve.index, curve.part)
            name = f"{curve.label}: {curve.part}" if curve.part in PARTS else curve.label
            text = printable(" ".join(name.split()))
            text = text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 1] + "…"
            options = style.line_options(dots=self.plot.separate or style.hollow)
            handles.setdefault(text, Line2D([], [], linewidth=WIDTH, markersize=5, **options))
        longest = max(map(len, handles), default=0)
        legend = self.figure.legend(
            list(handles.values()),
            # matplotlib leaves out names that start with an underscore.
            [f"\u200b{text}" if text.startswith("_") else text for text in handles],
            loc="upper left",
            bbox_to_anchor=(MARGINS["left"] - 0.02, 0.0),
            ncols=1 if longest > 32 else 2 if longest > 18 else 3,
            frameon=False,
            fontsize=FONT - 1.5,
            labelcolor=INK,
            handlelength=3,
        )
        for label in legend.get_texts():
            label.set_parse_math(False)


def _set_limits(axes: Axes, plot: Plot) -> None:
    """Fit the axes to the runs that did not diverge, if there are any: those would flatten them."""
    xs = finite_values(x for curve in plot.curves for x in curve.x)
    xs += finite_values(point.x for point in plot.points)
    if xs and (plot.from_zero or plot.log_x):
        # The limits are set below; matplotlib would warn when it guesses them from one point.
        axes.set_autoscalex_on(False)
    healthy = [curve for curve in plot.curves if curve.part != "diverged"] or plot.curves
    ys = finite_values(y for curve in healthy for y in curve.low + curve.high)
    ys = [y for y in ys if y > 0 or not plot.log_y]
    if ys:
        axes.set_autoscaley_on(False)
        low = min(ys) if plot.bottom is None else plot.bottom
        high = max(ys)
        near = plot.target is not None and 2 * low - high <= plot.target <= 2 * high - low
        if near and plot.target is not None and (plot.target > 0 or not plot.log_y):
            low = min(low, plot.target) if plot.bottom is None else low
            high = max(high, plot.target)
        if plot.log_y:
            axes.set_ylim(low / 1.25, high * 1.25)
        else:
            room = 0.06 * (high - low) or max(abs(high) * 0.02, 1e-3)
            axes.set_ylim(low - room if plot.bottom is None else low, high + room)
    if xs and plot.from_zero:
        axes.set_xlim(0, max(xs) * 1.015 or 1)
    elif xs and plot.log_x:
        room = max((max(xs) / min(xs)) ** 0.05, 1.3)
        axes.set_xlim(min(xs) / room, max(xs) * room)


def _style_axes(axes: Axes, plot: Plot) -> None:
    axes.set_xlabel(plot.x_label, color=INK, labelpad=6)
    axes.set_ylabel(plot.y_label, color=INK)
    axes.yaxis.set_label_coords(-0.145, 0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=MUTED, length=3, labelsize=FONT - 1)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    if plot.log_y:
        bottom, top = axes.get_ylim()
        narrow = math.log10(top / bottom) < 1.6  # decades
        locator = LogLocator(subs=(1.0, 2.0, 5.0), numticks=8) if narrow else LogLocator(numticks=6)
        axes.yaxis.set_major_locator(locator)
        write = format_power if bottom < 5e-4 else format_short
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    if plot.log_x:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_short(value)))
        axes.xaxis.set_minor_locator(NullLocator())
    if plot.ticks:
        _label_ticks(axes, plot)
    elif plot.from_zero:
        whole = plot.x_label != "training time, s"
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=whole))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _label_ticks(axes: Axes, plot: Plot) -> None:
    """Mark every value that has a meaning, and label as many as fit without touching.

    Chosen ones come first, then the ends, then the middle of the widest gap again and again.
    """
    low, high = axes.get_xlim()
    width = 72 * SIZE[0] * (MARGINS["right"] - MARGINS["left"])

    def place(value: float) -> float:
        if plot.log_x:
            return width * math.log(value / low) / math.log(high / low)
        return width * (value - low) / (high - low)

    ticks = sorted(set(plot.ticks))
    chosen = [point.x for point in plot.points if point.part == "chosen"]
    labels: dict[float, str] = {}
    for value in [*chosen, ticks[0], ticks[-1], *_halve(ticks)]:
        text = format_short(float(f"{value:.3g}") if value < 100 else value)
        if value not in labels and all(
            abs(place(value) - place(other)) >= LETTER * (len(text) + len(known)) / 2 + LABEL_GAP
            for other, known in labels.items()
        ):
            labels[value] = text
    axes.set_xticks(ticks, [labels.get(value, "") for value in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def _halve(ticks: Sequence[float]) -> list[float]:
    """Order values so that the first few of them are spread out."""
    ordered, spans = [], [(0, len(ticks) - 1)]
    for left, right in spans:
        if right - left > 1:
            middle = (left + right) // 2
            ordered.append(ticks[middle])
            spans += [(left, middle), (middle, right)]
    return ordered
