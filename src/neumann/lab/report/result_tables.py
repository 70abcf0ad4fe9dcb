"""The tables of a page as plain data: results, single seeds, learning rates and settings."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from neumann.lab.config_files import flatten
from neumann.lab.metrics import Metric, Quantity, choose_metric
from neumann.lab.report import formatting
from neumann.lab.report.formatting import NONE, format_interval, format_setting, format_value
from neumann.lab.report.runs import ArmRuns, Run, finite_values, to_number
from neumann.lab.report.study_records import Sensitivity, Study
from neumann.lab.studies.results import ArmResult, Comparison, FinishedRun
from neumann.lab.studies.statistics import mean_interval

PER_RUN = ("seed",)  # settings that differ between the runs of an arm on purpose
NOT_SET = "not set"  # an option that an arm leaves to its optimizer, or that it does not have
MAX_NAME = 24  # characters of an arm's name in a column title
RUN_ROWS = (  # heading with the loss's unit, key in the summary, format; after the score
    ("accuracy with BatchNorm recalibrated, %", "accuracy_recalibrated", ".2f"),
    ("training loss of the last epoch, {}", "train_loss", ".4g"),
    ("steps", "steps", ",.0f"),
)


@dataclass(frozen=True)
class Cell:
    """A cell with an optional second line in small print."""

    text: str
    note: str = ""
    style: Literal["", "bad", "bad-note", "different", "code"] = ""
    arm: int | None = None  # show the line of the arm with this index
    choices: tuple["Cell", ...] = ()  # instead of all this: a cell for each reference


@dataclass(frozen=True)
class Table:
    label: str  # for screen readers, and the title of a folded table
    titles: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]
    word_columns: int = 1  # from the left; the others hold numbers


@dataclass(frozen=True)
class Settings:
    commands: Table | None  # the arms in full, if their names say less
    differences: Table | None  # between the arms
    shared: Table
    environment: Table | None
    warning: str  # about runs in different environments; empty: there are none


def _cells(*texts: str) -> list[Cell]:
    return [Cell(text) for text in texts]


def tabulate_comparison(study: Study, comparisons: Sequence[Comparison]) -> Table:
    """Tabulate each arm's mean, interval, paired difference to each reference, and cost."""
    comparison = comparisons[0]
    target = comparison.target
    several = len(comparison.rows) > 1
    recalibrated = [_recalibrated_accuracies(arm) for arm in study.arms]
    metric = comparison.metric
    titles = [Cell("arm"), Cell("runs"), Cell(metric.label, "mean, 95 % CI")]
    titles += [Cell(extra.label, "mean") for extra in comparison.extras]
    if any(recalibrated):
        titles.append(Cell("recalibrated, %", "BatchNorm"))
    if several:
        titles += [_choose([_title_difference(each) for each in comparisons]), Cell("p")]
    if target is not None:
        titles += [Cell(f"steps to {metric.format_target(target)}", "mean"), Cell("epochs")]
    titles.append(Cell("seconds", "mean of training"))
    rows = []
    for number, arm in enumerate(study.arms):
        row, accuracies = comparison.rows[number], recalibrated[number]
        cells = [Cell(row.arm, arm=arm.index), _count_runs(row, comparison), _score(row, metric)]
        cells += [Cell(describe_extra(row, extra)) for extra in comparison.extras]
        if any(recalibrated):
            cells.append(Cell(format_interval(mean_interval(accuracies))))
        if several:
            found = [_difference(each.rows[number], metric) for each in comparisons]
            cells += [_choose(column) for column in zip(*found, strict=True)]
        if target is not None:
            cells += describe_target(list(row.runs.values()))
        rows.append([*cells, Cell(formatting.format_seconds(row.seconds))])
    return Table("Comparison of the arms", titles, rows)


def _choose(cells: Sequence[Cell]) -> Cell:
    return cells[0] if len(cells) == 1 else Cell("", choices=tuple(cells))


def _title_difference(comparison: Comparison) -> Cell:
    name = comparison.rows[comparison.reference].arm
    name = name if len(name) <= MAX_NAME else "reference"
    return Cell(f"{name} ahead by", f"{comparison.metric.difference_unit}, paired, 95 % CI")


def _count_runs(row: ArmResult, comparison: Comparison) -> Cell:
    done, seeds, diverged = len(row.runs), comparison.seeds, row.score.diverged
    count = f"{done} of {seeds}" if done < seeds else f"{done}"
    return Cell(count, f"{diverged} diverged" if diverged else "", "bad-note")


def _score(row: ArmResult, metric: Metric) -> Cell:
    if row.score.mean is None and row.score.diverged:
        return Cell("diverged", style="bad")
    return Cell(format_interval(row.score, metric), formatting.format_limits(row.score, metric))


def describe_extra(row: ArmResult, extra: Quantity) -> str:
    """Return the mean of a quantity beside the score."""
    found = row.extras.get(extra.key)
    return NONE if found is None or found.mean is None else extra.format(found.mean)


def _difference(row: ArmResult, metric: Metric) -> list[Cell]:
    found = row.difference
    if found is None:
        return [Cell("", "reference"), Cell("")]
    difference = Cell(
        format_interval(found, metric, signed=True), formatting.format_limits(found, metric)
    )
    return [difference, Cell(formatting.format_p_value(found))]


def describe_target(runs: Sequence[FinishedRun]) -> list[Cell]:
    """Return mean steps and epochs to the target over the seeds that reached it."""
    steps = [run.steps_to_target for run in runs if run.steps_to_target is not None]
    if not steps:
        return _cells("never" if runs else NONE, NONE)
    epochs = [run.epochs_to_target for run in runs if run.epochs_to_target is not None]
    missed = len(runs) - len(steps)
    return [
        Cell(f"{sum(steps) / len(steps):,.0f}", f"{missed} never" if missed else "", "bad-note"),
        Cell(f"{sum(epochs) / len(epochs):.1f}" if epochs else NONE),
    ]


def _recalibrated_accuracies(arm: ArmRuns) -> list[float]:
    found = [(run.summary or {}).get("accuracy_recalibrated") for run in arm.runs]
    return finite_values(map(to_number, found))


def tabulate_seeds(comparison: Comparison) -> Table:
    def cell(run: FinishedRun | None) -> Cell:
        if run is not None and not math.isfinite(run.score):
            return Cell("diverged", style="bad")
        return Cell(NONE if run is None else comparison.metric.format(run.score))

    seeds = range(comparison.seeds)
    titles = _cells("arm", *(f"seed {seed}" for seed in seeds))
    rows = [
        [Cell(row.arm), *(cell(row.runs.get(seed)) for seed in seeds)] for row in comparison.rows
    ]
    metric = comparison.metric
    return Table(f"{metric.name.capitalize()} of each seed, {metric.unit}", titles, rows)


def tabulate_trials(sensitivities: Sequence[Sensitivity], metric: Metric) -> Table:
    rows = []
    for arm in sensitivities:
        for trial in arm.trials:
            values = trial.scores
            notes = [
                "chosen" if arm.chosen is not None and trial is arm.best else "",
                f"{trial.diverged} diverged" if trial.diverged else "",
                f"{trial.missing} unfinished" if trial.missing else "",
            ]
            spread = (
                f"{metric.format(min(values))} to {metric.format(max(values))}"
                if len(values) > 1
                else NONE
            )
            mean = NONE if trial.mean is None else metric.format(trial.mean)
            note = ", ".join(filter(None, notes))
            name = Cell(arm.arm, arm=arm.index)
            rows.append([name, *_cells(f"{trial.lr:g}", mean, spread, note)])
    titles = _cells("arm", "lr", "mean", "lowest to highest", "")
    return Table(f"{metric.name.capitalize()} at each learning rate, {metric.unit}", titles, rows)


def tabulate_run(run: Run) -> Table | None:
    """Tabulate the result of one run; None before it has one."""
    if run.summary is None or run.diverged is not None:
        return None
    found = {key: to_number(value) for key, value in run.summary.items()}
    metric = choose_metric(run.config)
    quantities = dict.fromkeys((metric, *metric.extras, *metric.plotted))
    scores = [(each.label, each.key, f".{each.digits}f") for each in quantities]
    every = [*scores[:1], *RUN_ROWS[:1], *scores[1:], *RUN_ROWS[1:]]
    rows = [
        *(
            (label.format(metric.loss_unit), format_value(found.get(key), spec))
            for label, key, spec in every
        ),
        ("seconds of training", formatting.format_seconds(found.get("seconds"))),
        ("seconds of compiling", formatting.format_seconds(found.get("compile_seconds") or None)),
    ]
    return Table("Result", _cells("", "result"), [_cells(*row) for row in rows if row[1] != NONE])


def tabulate_settings(study: Study) -> Settings:
    """Tabulate config and environment of the runs; without runs, what the study says of them."""
    arms = study.arms
    runs = [run for arm in arms for run in arm.runs]
    configs = {arm.name: _merge([run.settings for run in arm.runs]) for arm in arms if arm.runs}
    differing = [key for key in _differing_keys(configs.values()) if key not in PER_RUN]
    several = len(configs) > 1
    shared = _merge([run.settings for run in runs] or [study.settings])
    shared = {key: value for key, value in shared.items() if key not in differing}
    environments = [flatten(run.environment) for run in runs]
    mixed = _differing_keys(environments)
    which = f"{formatting.format_list(mixed)} {'differs' if len(mixed) == 1 else 'differ'}"
    return Settings(
        _tabulate_commands(study.commands),
        _tabulate_differences(configs, differing) if several and differing else None,
        _tabulate_pairs("Settings that all arms share" if several else "Settings", shared),
        _tabulate_pairs("Environment", _merge(environments)) if environments else None,
        f"Not all runs had the same environment: {which}." if mixed else "",
    )


def _tabulate_commands(commands: Mapping[str, str]) -> Table | None:
    if all(name == text for name, text in commands.items()):
        return None
    rows = [[Cell(name), Cell(text, style="code")] for name, text in commands.items()]
    return Table("The arms in full", _cells("arm", "command"), rows, 2)


def _tabulate_differences(configs: Mapping[str, Mapping[str, str]], keys: Sequence[str]) -> Table:
    """Tabulate one arm per row; values that differ from the first arm's stand out."""
    first = next(iter(configs.values()))

    def cell(config: Mapping[str, str], key: str) -> Cell:
        value = config.get(key, NOT_SET)
        return Cell(value, style="" if value == first.get(key, NOT_SET) else "different")

    rows = [[Cell(name), *(cell(config, key) for key in keys)] for name, config in configs.items()]
    return Table("Where the arms differ", _cells("arm", *keys), rows, len(keys) + 1)


def _tabulate_pairs(label: str, values: Mapping[str, str]) -> Table:
    return Table(label, _cells("setting", "value"), [_cells(*pair) for pair in values.items()], 2)


def _merge(configs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return each setting as text, with all its values where they differ."""
    flat = [flatten(config) for config in configs]
    return {
        key: ", ".join(dict.fromkeys(format_setting(config.get(key)) for config in flat))
        for key in dict.fromkeys(key for config in flat for key in config)
    }


def _differing_keys(configs: Collection[Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if len({format_setting(c.get(key)) for c in configs}) > 1]
