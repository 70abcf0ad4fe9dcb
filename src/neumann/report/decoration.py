"""What surrounds the curves of a plot: limits, axes, phases, targets and single points."""

import math
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from neumann.report import wording
from neumann.report.palette import GRID, INK, MUTED, SHADE, style_of
from neumann.report.plots import Plot
from neumann.report.svg import Named

FONT = 12.0  # units of the SVG


def limits(axes: Axes, plot: Plot) -> None:
    """From the runs that went well, where there are any: a divergence would flatten them."""
    places = [x for c in plot.curves for x in c.x if math.isfinite(x)]
    places += [spot.x for spot in plot.spots if math.isfinite(spot.x)]
    if places and (plot.from_zero or plot.log_x):
        # What is set below need not be guessed: matplotlib warns of guesses about a single point.
        axes.set_autoscalex_on(False)
    sound = [c for c in plot.curves if c.part != "diverged"] or list(plot.curves)
    values = [v for c in sound for side in (c.low, c.high) for v in side if math.isfinite(v)]
    if plot.log_y:
        values = [value for value in values if value > 0]
    if values:
        axes.set_autoscaley_on(False)
        low = min(values) if plot.bottom is None else plot.bottom
        high = max(values)
        if plot.target is not None and low <= plot.target <= high + (high - low):
            high = max(high, plot.target)
        if plot.log_y:
            axes.set_ylim(low / 1.25, high * 1.25)
        else:
            room = 0.06 * (high - low) or max(abs(high) * 0.02, 1e-3)
            axes.set_ylim(low if plot.bottom is not None else low - room, high + room)
    if places and plot.from_zero:
        axes.set_xlim(0, max(places) * 1.015 or 1)
    elif places and plot.log_x:
        axes.set_xlim(min(places) / 1.3, max(places) * 1.3)


def dress(axes: Axes, plot: Plot) -> None:
    axes.set_xlabel(plot.x_label, color=INK)
    axes.set_ylabel(plot.y_label, color=INK)
    axes.yaxis.set_label_coords(-0.115, 0.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)
    axes.tick_params(colors=MUTED, length=3, labelsize=FONT - 1)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    if plot.log_y:
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        decades = math.log10(axes.get_ylim()[1] / axes.get_ylim()[0])
        axes.yaxis.set_minor_formatter(NullFormatter())
        if decades < 1.6:
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
        powers = axes.get_ylim()[0] < 5e-4
        axes.yaxis.set_major_formatter(FuncFormatter(partial(_tick, powers=powers)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    if plot.log_x:
        axes.xaxis.set_major_formatter(FuncFormatter(_tick))
        axes.xaxis.set_minor_locator(NullLocator())
        if 0 < len(plot.ticks) <= 9:
            axes.set_xticks(list(plot.ticks))
    elif plot.from_zero:
        whole = plot.x_label != "training time, s"
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=whole))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def target(axes: Axes, target: float) -> None:
    low, high = axes.get_ylim()
    if low < target < high:
        axes.axhline(target, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
        axes.annotate(
            f"target {target:g} %",
            (0, target),
            xycoords=axes.get_yaxis_transform(),
            ha="left",
            va="bottom",
            xytext=(4, 2),
            textcoords="offset points",
            fontsize=FONT - 1.5,
            color=MUTED,
        )


def marks(axes: Axes, plot: Plot, names: dict[str, Named]) -> None:
    """Shaded and labelled where there is one timetable, else in each arm's colour at the foot."""
    alone = len(plot.marks) == 1
    across = axes.get_xaxis_transform()
    for index, mark in enumerate(plot.marks):
        label = ", ".join(mark.labels)
        colour = style_of(mark.place).colour
        height = 0.012 + 0.022 * index
        if mark.warmup > 0:
            if alone:
                drawn: Any = axes.axvspan(0, mark.warmup, color=SHADE, linewidth=0, zorder=0)
                _say(axes, "warm-up", mark.warmup, "right")
            else:
                drawn = axes.plot(
                    [0, mark.warmup],
                    [height] * 2,
                    color=colour,
                    linewidth=2.5,
                    alpha=0.6,
                    transform=across,
                    solid_capstyle="butt",
                )[0]
            drawn.set_gid(f"warmup-{index}")
            names[f"warmup-{index}"] = Named(label, "warm-up")
        if not mark.resets:
            continue
        if alone:
            drawn = axes.vlines(
                mark.resets,
                0,
                1,
                transform=across,
                colors=MUTED,
                linewidth=0.9,
                linestyles=(0, (2, 2)),
                zorder=1,
            )
            _say(
                axes, "reset", mark.resets[-1], "left" if _early(axes, mark.resets[-1]) else "right"
            )
        else:
            drawn = axes.plot(
                mark.resets,
                [height] * len(mark.resets),
                color=colour,
                marker="|",
                markersize=9,
                markeredgewidth=1.6,
                linestyle="None",
                transform=across,
            )[0]
        drawn.set_gid(f"resets-{index}")
        names[f"resets-{index}"] = Named(label, "resets")


def _early(axes: Axes, x: float) -> bool:
    return x < 0.85 * axes.get_xlim()[1]


def _say(axes: Axes, text: str, x: float, align: str) -> None:
    axes.annotate(
        text,
        (x, 1),
        xycoords=axes.get_xaxis_transform(),
        ha=align,
        va="bottom",
        xytext=(2 if align == "left" else -2, 1),
        textcoords="offset points",
        fontsize=FONT - 1.5,
        color=MUTED,
    )


def spots(axes: Axes, plot: Plot, names: dict[str, Named]) -> None:
    taken: dict[float, int] = {}
    for index, spot in enumerate(plot.spots):
        colour = style_of(spot.place).colour
        foot = spot.y is None
        level = taken[spot.x] = taken.get(spot.x, -1) + 1 if foot else 0
        (drawn,) = axes.plot(
            [spot.x],
            [0.03 + 0.05 * level if spot.y is None else spot.y],
            transform=axes.get_xaxis_transform() if foot else axes.transData,
            marker="x" if spot.part == "diverged" else "o",
            markersize=8 if spot.part == "diverged" else 12,
            markeredgewidth=2,
            markeredgecolor=colour,
            markerfacecolor="none",
            linestyle="None",
            clip_on=not foot,
            zorder=5,
        )
        drawn.set_gid(f"spot-{index}")
        names[f"spot-{index}"] = Named(spot.label, spot.part)


def _tick(value: float, _: int | None = None, *, powers: bool = False) -> str:
    return wording.power(value) if powers else wording.short(value)
