"""The tables of a page: the comparison, its single seeds, and the result of one run."""

import math
from collections.abc import Sequence
from xml.etree.ElementTree import Element

from neumann.lab.comparison import Comparison, Finished, Row
from neumann.lab.statistics import mean_interval
from neumann.report import wording
from neumann.report.curves import ArmRuns
from neumann.report.legends import swatch
from neumann.report.markup import Child, breakable, tag
from neumann.report.runs import Run, number
from neumann.report.sensitivity import Sensitivity
from neumann.report.studies import Study

Cell = Child | tuple[Child, ...]


def scrolling(
    titles: Sequence[Cell], rows: Sequence[Sequence[Cell]], *, words: int = 1, label: str
) -> Element:
    """A table in a box of its own that scrolls, so that the page does not.

    Args:
        titles: of the columns.
        rows: the cells; the first of each is its heading.
        words: how many columns from the left hold words; the others hold numbers.
        label: what the table is, for screen readers.
    """

    def cell(index: int, content: Cell, name: str, scope: str | None) -> Element:
        children = content if isinstance(content, tuple) else (content,)
        return tag(name, children, class_="word" if index < words else "number", scope=scope)

    head = [cell(index, title, "th", "col") for index, title in enumerate(titles)]
    body = [
        tag(
            "tr",
            [
                cell(index, content, "td" if index else "th", None if index else "row")
                for index, content in enumerate(row)
            ],
        )
        for row in rows
    ]
    table = tag("table", tag("thead", tag("tr", head)), tag("tbody", body))
    # A region that scrolls must be reachable by keyboard.
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=label)


def arm_name(name: str, place: int | None = None) -> Element:
    """As the heading of a row, with its line."""
    line = None if place is None else swatch(place)
    return tag("span", line, tag("span", breakable(name)), class_="arm")


def comparison_table(study: Study, comparison: Comparison) -> Element:
    """Mean, interval and paired difference of each arm, and what it took."""
    first, target = comparison.rows[0], comparison.target
    places = {arm.name: arm for arm in study.arms}
    recalibrated = any(math.isfinite(_recalibrated(run)) for arm in study.arms for run in arm.runs)
    titles: list[Cell] = ["arm", "runs", ("accuracy, %", tag("small", "mean, 95 % CI"))]
    if recalibrated:
        titles.append(("recalibrated, %", tag("small", "BatchNorm")))
    if len(comparison.rows) > 1:
        titles += [(_ahead(first.arm), tag("small", "points, paired, 95 % CI")), "p"]
    if target is not None:
        titles += [(f"steps to {target:g} %", tag("small", "mean")), "epochs"]
    titles.append(("seconds", tag("small", "mean of training")))
    rows = []
    for row in comparison.rows:
        arm = places[row.arm]
        cells: list[Cell] = [arm_name(row.arm, arm.place), _runs(row, comparison), _accuracy(row)]
        if recalibrated:
            cells.append(_mean_recalibrated(arm))
        if len(comparison.rows) > 1:
            cells += _difference(row, first)
        if target is not None:
            cells += _to_target(list(row.runs.values()))
        rows.append([*cells, wording.seconds(row.seconds)])
    return scrolling(titles, rows, label="The arms compared")


def seeds_table(comparison: Comparison) -> Element:
    """The accuracy of every training."""
    titles = ["arm", *(f"seed {seed}" for seed in range(comparison.seeds))]
    rows = [
        [arm_name(row.arm), *(_one(row.runs.get(seed)) for seed in range(comparison.seeds))]
        for row in comparison.rows
    ]
    return scrolling(titles, rows, label="Accuracy of each seed, %")


def trials_table(found: Sequence[Sensitivity]) -> Element:
    """The accuracy at every learning rate that was tried."""
    rows: list[list[Cell]] = []
    for each in found:
        for trial in each.trials:
            values = trial.accuracies
            several = len(values) > 1
            notes = [
                "chosen" if each.chosen is not None and trial is each.best else "",
                f"{trial.diverged} diverged" if trial.diverged else "",
                f"{trial.missing} not ended" if trial.missing else "",
            ]
            rows.append(
                [
                    arm_name(each.arm, each.place),
                    f"{trial.lr:g}",
                    wording.percent(trial.mean),
                    f"{min(values):.2f} to {max(values):.2f}" if several else wording.NOTHING,
                    ", ".join(note for note in notes if note),
                ]
            )
    titles = ["arm", "lr", "mean", "lowest to highest", ""]
    return scrolling(titles, rows, label="Accuracy at each learning rate, %")


def run_table(run: Run) -> Element | None:
    """What came out of one run."""
    summary = run.summary
    if summary is None or run.diverged is not None:
        return None
    rows: list[tuple[str, str]] = [
        ("accuracy, %", wording.percent(summary.get("accuracy"))),
        ("accuracy with BatchNorm recalibrated, %", wording.percent(_recalibrated(run))),
        ("loss, nats", _digits(summary.get("loss"))),
        ("loss in training, last epoch, nats", _digits(summary.get("train_loss"))),
        ("steps", f"{number(summary.get('steps')):,.0f}"),
        ("seconds of training", wording.seconds(number(summary.get("seconds")))),
        ("seconds of compiling", wording.seconds(number(summary.get("compile_seconds")) or None)),
    ]
    shown = [row for row in rows if row[1] != wording.NOTHING]
    return scrolling(["", "result"], shown, label="The result")


def _ahead(first: str) -> str:
    return f"{first} ahead by" if len(first) <= 12 else "first arm ahead by"


def _runs(row: Row, comparison: Comparison) -> Cell:
    ended = f"{len(row.runs)}"
    if len(row.runs) < comparison.seeds:
        ended += f" of {comparison.seeds}"
    if not row.accuracy.diverged:
        return ended
    return ended, tag("small", f"{row.accuracy.diverged} diverged", class_="bad")


def _accuracy(row: Row) -> Cell:
    if row.accuracy.mean is None:
        return tag("span", "diverged", class_="bad") if row.accuracy.diverged else wording.NOTHING
    if row.accuracy.low is None:
        return wording.interval(row.accuracy)
    return wording.interval(row.accuracy), tag("small", wording.limits(row.accuracy))


def _difference(row: Row, first: Row) -> list[Cell]:
    if row is first or row.difference is None:
        return ["", ""]
    shown: Cell = wording.interval(row.difference, signed=True)
    if row.difference.low is not None:
        shown = (str(shown), tag("small", wording.limits(row.difference)))
    return [shown, wording.probability(row.difference.p)]


def _to_target(runs: Sequence[Finished]) -> list[Cell]:
    """Means over the seeds that reached it."""
    if not runs:
        return [wording.NOTHING, wording.NOTHING]
    steps = [run.steps_to_target for run in runs if run.steps_to_target is not None]
    if not steps:
        return ["never", wording.NOTHING]
    epochs = [run.epochs_to_target for run in runs if run.epochs_to_target is not None]
    missed = len(runs) - len(steps)
    shown = f"{sum(steps) / len(steps):,.0f}"
    return [
        (shown, tag("small", f"{missed} never", class_="bad")) if missed else shown,
        f"{sum(epochs) / len(epochs):.1f}" if epochs else wording.NOTHING,
    ]


def _one(run: Finished | None) -> Cell:
    if run is None:
        return wording.NOTHING
    if not math.isfinite(run.accuracy):
        return tag("span", "diverged", class_="bad")
    return wording.percent(run.accuracy)


def _recalibrated(run: Run) -> float:
    return number((run.summary or {}).get("accuracy_recalibrated"))


def _mean_recalibrated(arm: ArmRuns) -> Cell:
    values = [value for run in arm.runs if math.isfinite(value := _recalibrated(run))]
    return wording.interval(mean_interval(values))


def _digits(value: object) -> str:
    found = number(value)
    return f"{found:.4g}" if math.isfinite(found) else wording.NOTHING
