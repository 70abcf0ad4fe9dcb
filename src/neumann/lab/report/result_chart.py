"""The result in one picture: a row for each arm with its mean, the 95 % interval and every seed.

Positions are percentages of the width, so that a page can draw the rows at any width without
making their text smaller.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from neumann.lab.metrics import Metric
from neumann.lab.report.formatting import (
    format_count,
    format_interval,
    format_limits,
    format_short,
    join_sentences,
)
from neumann.lab.report.runs import finite_values
from neumann.lab.report.study_records import Study
from neumann.lab.studies.results import ArmResult, Comparison

# An axis that is this many times as wide as the better half of the arms would squeeze their points
# into one, so it leaves out what lies far off.
FAR = 10
MAX_TICKS = 6
ROOM = 0.04  # of the width, on each side
LEVELS, DOT = 3, 0.6  # of small dots below a line, and the width of a dot in %


@dataclass(frozen=True)
class Seed:
    position: float
    level: int  # below others at almost the same position
    text: str


@dataclass(frozen=True)
class ChartRow:
    arm: str
    index: int  # it determines the color
    text: str  # the result in numbers
    note: str  # what is missing from it
    mean: float | None  # None: there is none, or it lies beyond the axis
    interval: tuple[float, float] | None
    seeds: tuple[Seed, ...]
    beyond: tuple[str, ...]  # the sides on which something lies beyond the axis
    far: str  # the mean, if it lies beyond the axis
    spoken: str  # for screen readers


@dataclass(frozen=True)
class ResultChart:
    title: str
    rows: tuple[ChartRow, ...]
    ticks: tuple[tuple[float, str], ...]  # position and label
    caption: str

    @property
    def letters(self) -> int:
        """How many characters the longest result has."""
        return max(len(row.text) for row in self.rows)


def chart_result(study: Study) -> ResultChart | None:
    """Chart the arms of a comparison; None before a run has finished."""
    comparison = study.comparison
    if comparison is None:
        return None
    extents = [_find_extent(row) for row in comparison.rows]
    known = [extent for extent in extents if extent is not None]
    if not known:
        return None
    low, high = _choose_limits(comparison, extents)
    rows = tuple(
        _place(row, arm.index, comparison, low, high)
        for arm, row in zip(study.arms, comparison.rows, strict=True)
    )
    on = "held-out data" if study.settings.get("held_out") else "the test set"
    metric = comparison.metric
    better = "" if metric.higher_is_better else "; lower is better"
    ticks = _choose_ticks(low, high)
    return ResultChart(
        f"{metric.name.capitalize()} on {on}, {metric.unit}{better}",
        rows,
        tuple((_scale(tick, low, high), format_short(tick)) for tick in ticks),
        _explain(rows),
    )


def _find_extent(row: ArmResult) -> tuple[float, float] | None:
    """Return the lowest and the highest value that the row shows."""
    shown = _list_values(row)
    return (min(shown), max(shown)) if shown else None


def _list_values(row: ArmResult) -> list[float]:
    edges = row.score.mean, row.score.low, row.score.high
    return [
        *finite_values(run.score for run in row.runs.values()),
        *(edge for edge in edges if edge is not None),
    ]


def _choose_limits(
    comparison: Comparison, extents: Sequence[tuple[float, float] | None]
) -> tuple[float, float]:
    """Fit the axis to all arms, or if that would squeeze the better ones, to all that are near.

    The better half, which decides how near that is, has at least two: a result is a comparison.
    """
    metric = comparison.metric
    known = [
        (metric.gain(row.score.mean), extent)
        for row, extent in zip(comparison.rows, extents, strict=True)
        if extent is not None and row.score.mean is not None
    ]
    known.sort(reverse=True)
    low, high = _span([extent for _, extent in known])
    better = known[: max(2, math.ceil(len(known) / 2))]
    best_low, best_high = _span([extent for _, extent in better])
    reach = FAR * (best_high - best_low)
    if 0 < reach < high - low:
        values = [value for row in comparison.rows for value in _list_values(row)]
        if metric.higher_is_better:
            low = min(value for value in values if value >= best_high - reach)
        else:
            high = max(value for value in values if value <= best_low + reach)
    room = ROOM * (high - low) or max(abs(high) * 0.01, 1e-6)
    return low - room, high + room


def _span(extents: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return min(low for low, _ in extents), max(high for _, high in extents)


def _scale(value: float, low: float, high: float) -> float:
    return round(100 * (value - low) / (high - low), 2)


def _place(row: ArmResult, index: int, comparison: Comparison, low: float, high: float) -> ChartRow:
    metric, score = comparison.metric, row.score
    scores = {s: run.score for s, run in row.runs.items() if math.isfinite(run.score)}
    extent = _find_extent(row)
    beyond = []
    if extent is not None:
        beyond += ["left"] if extent[0] < low else []
        beyond += ["right"] if extent[1] > high else []
    interval = None
    if score.low is not None and score.high is not None and score.low < high and score.high > low:
        interval = (
            _scale(max(score.low, low), low, high),
            _scale(min(score.high, high), low, high),
        )
    seen = score.mean is not None and low <= score.mean <= high
    return ChartRow(
        row.arm,
        index,
        "diverged" if score.mean is None and score.diverged else format_interval(score, metric),
        _describe_gaps(row, comparison),
        _scale(score.mean, low, high) if seen and score.mean is not None else None,
        interval,
        _stack(
            (_scale(value, low, high), f"seed {seed}: {metric.format(value)} {metric.unit}")
            for seed, value in scores.items()
            if low <= value <= high
        ),
        tuple(beyond),
        "" if seen or score.mean is None else metric.format(score.mean),
        _speak(row, metric),
    )


def _stack(seeds: Iterable[tuple[float, str]]) -> tuple[Seed, ...]:
    """Put dots that would hide each other on different levels."""
    ends = [-math.inf] * LEVELS
    placed = []
    for position, text in sorted(seeds):
        free = (level for level, end in enumerate(ends) if position - end > DOT)
        level = next(free, 0)
        ends[level] = position
        placed.append(Seed(position, level, text))
    return tuple(placed)


def _describe_gaps(row: ArmResult, comparison: Comparison) -> str:
    done, seeds = len(row.runs), comparison.seeds
    notes = [f"{done} of {seeds} runs"] if done < seeds else []
    if row.score.diverged and row.score.mean is not None:
        notes.append(f"{row.score.diverged} diverged")
    return ", ".join(notes)


def _speak(row: ArmResult, metric: Metric) -> str:
    if row.score.mean is None:
        return f"{row.arm}: no result"
    limits = format_limits(row.score, metric)
    parts = [
        f"{row.arm}: mean {metric.format(row.score.mean)} {metric.unit}",
        f"95 % interval {limits}" if limits else "",
        f"over {format_count(row.score.n, 'seed')}",
    ]
    return ", ".join(filter(None, parts))


def _explain(rows: Sequence[ChartRow]) -> str:
    intervals = any(row.interval for row in rows)
    beyond = any(row.beyond for row in rows)
    return join_sentences(
        "Large points are means, lines their 95 % intervals, small dots the seeds."
        if intervals
        else "One seed for each arm, so there are no intervals.",
        "The axis is cut: an arrow points to what lies outside." if beyond else "",
    )


def _choose_ticks(low: float, high: float) -> list[float]:
    """Return a few round numbers between the limits."""
    power = 10.0 ** math.floor(math.log10((high - low) / MAX_TICKS))
    step = next(
        power * factor
        for factor in (1, 2, 5, 10, 20)
        if (high - low) / (power * factor) < MAX_TICKS
    )
    first, last = math.ceil(low / step), math.floor(high / step)
    return [round(step * count, 12) for count in range(first, last + 1)]
