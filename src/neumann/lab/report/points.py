"""A study with axes: the results of its points side by side, in tables and along each axis."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from neumann.lab.report.formatting import NONE, format_interval, format_p_value
from neumann.lab.report.plot import Curve, Plot
from neumann.lab.report.references import list_references
from neumann.lab.report.result_tables import Cell, Table
from neumann.lab.report.study_records import Study, read_study
from neumann.lab.studies import study_files
from neumann.lab.studies.results import ArmResult, Comparison
from neumann.lab.studies.study_files import COMPARISON, SWEEP

INTERVALS = "Bars are 95 % confidence intervals of the means."
LOG_RATIO = 8  # between the largest and the smallest value of an axis


@dataclass(frozen=True)
class PointResult:
    folder: str  # relative to the study's
    label: str
    values: Mapping[str, Any]  # by axis
    study: Study | None  # None: it has not started

    @property
    def comparison(self) -> Comparison | None:
        return None if self.study is None else self.study.comparison

    @property
    def reference(self) -> str | None:
        found = self.comparison
        return None if found is None else found.rows[found.reference].arm

    def compare_with(self, reference: str) -> "PointResult":
        """Return the same point with another arm as the reference, if it has that arm."""
        names = [row.arm for row in self.comparison.rows] if self.comparison else []
        if self.study is None or self.comparison is None or reference not in names:
            return self
        compared = self.comparison.compare_with(names.index(reference))
        return replace(self, study=replace(self.study, comparison=compared))

    def find_row(self, arm: str) -> ArmResult | None:
        rows = () if self.comparison is None else self.comparison.rows
        return next((row for row in rows if row.arm == arm), None)


@dataclass(frozen=True)
class Overview:
    """A study with axes, as far as it has got."""

    name: str  # of the folder
    title: str
    about: str
    axes: Mapping[str, Sequence[Any]]
    points: tuple[PointResult, ...]

    @property
    def arms(self) -> list[str]:
        found = [point.comparison for point in self.points]
        rows = (row for comparison in found if comparison for row in comparison.rows)
        return list(dict.fromkeys(row.arm for row in rows))

    @cached_property
    def compared(self) -> dict[str, list[PointResult]]:
        """The points once for each reference."""
        return {
            reference: [point.compare_with(reference) for point in self.points]
            for reference in list_references(self.arms)
        }


def has_points(folder: Path) -> bool:
    """Whether a folder holds a study with axes."""
    there = (folder / study_files.STUDY).is_file()
    return there and bool(study_files.read_study_file(folder)["axes"])


def read_overview(folder: Path) -> Overview:
    content = study_files.read_study_file(folder)
    points = []
    for each in content["points"]:
        values, place = each["values"], study_files.get_part_folder(folder, each["folder"])
        label = ", ".join(f"{name_axis(key)} {value}" for key, value in values.items())
        study = None
        if any((place / name).is_file() for name in (COMPARISON, SWEEP)):
            study = replace(read_study(place), title=f"{content['title']}: {label}".lstrip(": "))
        points.append(PointResult(each["folder"], label, values, study))
    name = folder.resolve().name
    return Overview(name, content["title"], content["about"], content["axes"], tuple(points))


def name_axis(key: str) -> str:
    """Name an axis in words: "batch size", or "neumann: reset growth" for an option."""
    return key.replace("_", " ").replace(":", ": ")


def tabulate_points(overview: Overview) -> list[Table]:
    """The score of each arm at each point, and how far each reference is ahead."""
    points, arms = overview.points, overview.arms
    if not arms:
        return []
    metric = next(point.comparison.metric for point in points if point.comparison)
    titles = [Cell("arm"), *(Cell(point.label) for point in points)]

    def make(label: str, shown: Sequence[str], cell: Callable[[PointResult, str], Cell]) -> Table:
        rows = [
            [Cell(arm, arm=arms.index(arm)), *(cell(point, arm) for point in points)]
            for arm in shown
        ]
        return Table(label, titles, rows)

    def ahead(point: PointResult, arm: str) -> Cell:
        number = points.index(point)
        found = [
            _describe_difference(of[number], ref, arm) for ref, of in overview.compared.items()
        ]
        return found[0] if len(found) == 1 else Cell("", choices=tuple(found))

    tables = [make(f"{metric.label.capitalize()}, mean and 95 % interval", arms, _describe_score)]
    if len(arms) > 1:
        label = f"How far the reference is ahead, {metric.difference_unit}, paired, 95 % interval"
        tables.append(make(label, arms, ahead))
    if any(point.study and point.study.search for point in points):
        tables.append(make("Learning rates chosen on held-out data", arms, _describe_lr))
    return tables


def _describe_score(point: PointResult, arm: str) -> Cell:
    row, comparison = point.find_row(arm), point.comparison
    if row is None or comparison is None:
        return Cell(NONE)
    if row.score.mean is None and row.score.diverged:
        return Cell("diverged", style="bad")
    notes = [f"{row.score.diverged} diverged"] if row.score.diverged else []
    if len(row.runs) < comparison.seeds:
        notes.append(f"{len(row.runs)} of {comparison.seeds} runs")
    return Cell(format_interval(row.score, comparison.metric), ", ".join(notes), "bad-note")


def _describe_difference(point: PointResult, reference: str, arm: str) -> Cell:
    if arm == reference:
        return Cell("", "reference")
    row, comparison = point.find_row(arm), point.comparison
    if comparison is None or row is None or row.difference is None or point.reference != reference:
        return Cell(NONE)
    shown = format_interval(row.difference, comparison.metric, signed=True)
    return Cell(shown, f"p {format_p_value(row.difference)}, n {row.difference.n}")


def _describe_lr(point: PointResult, arm: str) -> Cell:
    search = None if point.study is None else point.study.search
    lr = (search.winners or {}).get(arm) if search else None
    if search is None or lr is None:
        return Cell(NONE)
    source = search.sources.get(arm)
    return Cell(f"{lr:g}", f"the rate of {source}" if source else "")


def plot_points(overview: Overview) -> list[Plot]:
    """Plot the score along each axis of numbers, once for all values of the other axes."""
    plots: list[Plot] = []
    for axis, values in overview.axes.items():
        if len(values) < 2 or not all(isinstance(value, int | float) for value in values):
            continue
        others = [
            {key: value for key, value in point.values.items() if key != axis}
            for point in overview.points
        ]
        for fixed in _drop_duplicates(others):
            line = [p for p in overview.points if fixed.items() <= dict(p.values).items()]
            place = "".join(f", {name_axis(key)} {value}" for key, value in fixed.items())
            plots += _plot_line(f"along-{len(plots)}", overview.arms, line, axis, place)
    return plots


def _plot_line(
    name: str, arms: Sequence[str], points: Sequence[PointResult], axis: str, place: str
) -> list[Plot]:
    """Plot the scores of these points; nothing before there is one."""
    metric = next((point.comparison.metric for point in points if point.comparison), None)
    curves = [_make_curve(arm, index, points, axis) for index, arm in enumerate(arms)]
    curves = [curve for curve in curves if not curve.is_empty]
    if metric is None or not curves:
        return []
    ticks = tuple(sorted(float(point.values[axis]) for point in points))
    far_apart = min(ticks) > 0 and max(ticks) > LOG_RATIO * min(ticks)
    plot = Plot(
        name,
        f"{metric.label.capitalize()} by {name_axis(axis)}{place}",
        metric.label,
        tuple(curves),
        x_label=name_axis(axis),
        log_x=far_apart,
        from_zero=False,
        ticks=ticks,
        separate=True,
        dodge=True,
        band_note=INTERVALS,
    )
    return [plot]


def _make_curve(arm: str, index: int, points: Sequence[PointResult], axis: str) -> Curve:
    x, y, low, high = [], [], [], []
    for point in sorted(points, key=lambda point: float(point.values[axis])):
        row = point.find_row(arm)
        mean = None if row is None else row.score.mean
        if row is not None and mean is not None:
            x.append(float(point.values[axis]))
            y.append(mean)
            low.append(mean if row.score.low is None else row.score.low)
            high.append(mean if row.score.high is None else row.score.high)
    return Curve(arm, index, "mean", tuple(x), tuple(y), tuple(low), tuple(high))


def _drop_duplicates(values: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for index, each in enumerate(values) if each not in values[:index]]
