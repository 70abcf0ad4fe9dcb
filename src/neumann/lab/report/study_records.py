"""What a folder holds: a run, a comparison or a sweep. Each can be read while it is underway.

A sweep consists of

    sweep.json     the grid of learning rates by arm, the winners (null while searching), the seeds
    search/        a comparison on held-out data: every arm at every learning rate of its grid
    final/         the comparison of the winners on the test set, once they are known

A comparison whose arms differ only in lr also shows their sensitivity to it. Any other folder is a
UsageError, and so is a file that this version cannot read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from neumann.lab.contenders import Contender
from neumann.lab.errors import UsageError
from neumann.lab.metrics import ACCURACY, Metric, choose_metric
from neumann.lab.report.arm_names import shorten_names
from neumann.lab.report.formatting import format_list
from neumann.lab.report.runs import ArmRuns, finite_values, is_run, read_run, to_number
from neumann.lab.storage.reading import CONFIG, RESTORE, RecordsError
from neumann.lab.studies import study_files
from neumann.lab.studies.results import Comparison, read_comparison
from neumann.lab.studies.study_files import (
    COMPARISON,
    FINAL,
    SEARCH,
    STUDY,
    SWEEP,
    is_comparison,
)
from neumann.lab.studies.wording import describe_warmup_of_arm


@dataclass(frozen=True)
class Trial:
    """One learning rate of an arm."""

    lr: float
    scores: tuple[float, ...]  # of the seeds that finished with one
    diverged: int  # seeds
    missing: int  # seeds that have not finished

    @property
    def mean(self) -> float | None:
        return math.fsum(self.scores) / len(self.scores) if self.scores else None


@dataclass(frozen=True)
class Sensitivity:
    arm: str  # without lr
    index: int  # among the arms; it determines the color
    trials: tuple[Trial, ...]  # by ascending lr
    chosen: float | None = None  # the learning rate that a sweep chose
    metric: Metric = ACCURACY

    @property
    def best(self) -> Trial | None:
        """The chosen trial, else the one with the best mean among those without divergence."""
        if (chosen := self.chosen) is not None:
            return next((t for t in self.trials if math.isclose(t.lr, chosen)), None)
        stable = [trial for trial in self.trials if trial.mean is not None and not trial.diverged]
        return max(stable, key=lambda trial: self.metric.gain(trial.mean or 0.0), default=None)

    def warning(self) -> str | None:
        """Return a sentence if everything diverged or the best learning rate is not bracketed."""
        best, rates = self.best, [trial.lr for trial in self.trials]
        if best is None:
            waiting = any(trial.missing for trial in self.trials)
            diverged = any(trial.diverged for trial in self.trials) and not waiting
            return f"{self.arm} diverged at every learning rate tried." if diverged else None
        if len(rates) < 2 or best.lr not in (rates[0], rates[-1]):
            return None
        end, side = ("lowest", "lower") if best.lr == rates[0] else ("highest", "higher")
        return (
            f"The best learning rate of {self.arm}, {best.lr:g}, is the {end} tried: it is not "
            f"bracketed, and a {side} one may be better."
        )


@dataclass(frozen=True)
class Search:
    """How far a sweep has got."""

    winners: dict[str, float] | None  # lr by arm; None while searching
    missing: int  # runs of the search that have not finished
    runs: int  # planned for the search
    final_missing: int  # runs of the final comparison that have not finished
    final_runs: int  # planned for it
    arms: tuple[str, ...] = ()  # all of them, whether a learning rate is searched for them or not
    sources: Mapping[str, str] = field(default_factory=dict)  # whose rate an unsearched arm takes
    warmups: tuple[str, ...] = ()  # sentences about arms that never left their warm-up

    def describe_sources(self) -> list[str]:
        """Say which arms take the learning rate of another."""
        takers: dict[str, list[str]] = {}
        for arm, source in self.sources.items():
            takers.setdefault(source, []).append(arm)
        return [
            f"{format_list(arms)} {'takes' if len(arms) == 1 else 'take'} the rate of {source}"
            for source, arms in takers.items()
        ]


@dataclass(frozen=True)
class Study:
    """Everything a report is made from."""

    name: str  # of the folder
    arms: tuple[ArmRuns, ...]  # whose curves are drawn
    comparison: Comparison | None  # None for a run, and for a sweep before its final comparison
    settings: dict[str, Any]  # of the first run
    sensitivities: tuple[Sensitivity, ...] = ()
    search: Search | None = None  # of a sweep
    title: str = ""  # that someone gave it; empty: none
    about: str = ""
    commands: Mapping[str, str] = field(default_factory=dict)  # each arm's text, by its name

    @property
    def metric(self) -> Metric:
        """What the runs are scored by."""
        if self.comparison is not None:
            return self.comparison.metric
        return choose_metric(self.settings)

    @property
    def target(self) -> float | None:
        """The score whose first time was recorded."""
        if self.comparison is not None:
            return self.comparison.target
        target = self.settings.get("target")
        return target if isinstance(target, int | float) else None


def read_study(folder: Path) -> Study:
    """Read a run, a comparison or a sweep, with the title that a study file gave it."""
    folder = Path(folder)
    study = _read_records(folder)
    if (folder / STUDY).is_file():
        content = study_files.read_study_file(folder)
        study = replace(study, title=content["title"], about=content["about"])
    return study


def _read_records(folder: Path) -> Study:
    name = folder.resolve().name
    if (folder / SWEEP).is_file():
        return _read_sweep(folder, name)
    if is_comparison(folder):
        read, settings = _read_comparison(folder, name)
        without_lr = shorten_names([_without_lr(row.text) for row in read.rows])
        sensitivities = _collect_sensitivities(read, settings.get("lr"), without_lr)
        comparison = _rename(read, shorten_names([row.text for row in read.rows]))
        arms = _read_arms(folder, comparison)
        settings = _first_config(arms) or settings
        commands = _list_commands(comparison)
        return Study(name, arms, comparison, settings, sensitivities, commands=commands)
    if is_run(folder):
        run = read_run(folder)
        text = str(run.config.get("opt", "run"))
        arm = ArmRuns(shorten_names([text])[text], 0, (run,))
        return Study(name, (arm,), None, run.config, commands={arm.name: text})
    raise UsageError(
        f"{folder} holds nothing to report: a run has a {CONFIG}, a comparison a {COMPARISON}, "
        f"a sweep a {SWEEP}, a study a {STUDY}"
    )


def _read_sweep(folder: Path, name: str) -> Study:
    content = study_files.read_sweep_file(folder)
    grid, winners = content["grid"], content["winners"]
    chosen = None
    if winners is not None:
        chosen = {_without_lr(arm): to_number(lr) for arm, lr in winners.items()}
    order = {_without_lr(arm): index for index, arm in enumerate(grid)}
    # An arm has the same name in the search and in the final comparison.
    names = shorten_names([*order, *(chosen or {})])
    runs = content.get("search_seeds", 0) * sum(len(rates) for rates in grid.values())
    final_runs = content.get("seeds", 0) * len(grid if chosen is None else chosen)
    winners = None if chosen is None else {names[arm]: lr for arm, lr in chosen.items()}
    everyone = tuple(names[arm] for arm in order)
    sources = {
        names[_without_lr(arm)]: names[source]
        for arm, rates in grid.items()
        if not rates and (source := _find_source(arm)) in names
    }
    search = Search(winners, runs, runs, final_runs, final_runs, everyone, sources)
    study = Study(name, (), None, {}, (), search)
    if _has_begun(part := study_files.get_part_folder(folder, SEARCH)):
        searched, settings = _read_comparison(part, f"{name}/{SEARCH}")
        found = _collect_sensitivities(searched, settings.get("lr"), names, winners, min_rates=1)
        places = {names[arm]: index for arm, index in order.items()}
        sensitivities = tuple(replace(each, index=places.get(each.arm, 0)) for each in found)
        stuck = {
            names.get(_without_lr(row.text), row.arm): row.long_warmup
            for row in searched.rows
            if row.long_warmup is not None
        }
        warmups = tuple(describe_warmup_of_arm(arm, steps) for arm, steps in stuck.items())
        runs, missing = searched.seeds * len(searched.rows), searched.missing
        search = replace(search, runs=runs, missing=missing, warmups=warmups)
        study = replace(study, settings=settings, sensitivities=sensitivities, search=search)
    if _has_begun(part := study_files.get_part_folder(folder, FINAL)):
        read, settings = _read_comparison(part, f"{name}/{FINAL}")
        final = _rename(
            read, {row.text: names.get(_without_lr(row.text), row.arm) for row in read.rows}
        )
        arms = tuple(
            replace(arm, index=order.get(_without_lr(row.text), arm.index))
            for arm, row in zip(_read_arms(part, final), final.rows, strict=True)
        )
        planned = final.seeds * len(final.rows)
        search = replace(search, final_missing=final.missing, final_runs=planned)
        settings = _first_config(arms) or settings
        study = replace(study, arms=arms, comparison=final, settings=settings, search=search)
        study = replace(study, commands=_list_commands(final))
    return study


def _has_begun(part: Path) -> bool:
    """Whether a part of a sweep has begun; raise if it has runs and not the file before them."""
    if is_comparison(part):
        return True
    if part.is_dir() and any(entry.is_dir() or entry.is_symlink() for entry in part.iterdir()):
        raise RecordsError(f"{part / COMPARISON} is missing, and its folder has runs; {RESTORE}")
    return False


def _read_comparison(folder: Path, name: str) -> tuple[Comparison, dict[str, Any]]:
    """Read a comparison and the settings that its runs share.

    Its folder becomes a name: a page goes to other people, whose machines do not have the path.
    """
    settings = study_files.read_comparison_file(folder).get("settings", {})
    return replace(read_comparison(folder), folder=Path(name)), settings


def _rename(comparison: Comparison, names: Mapping[str, str]) -> Comparison:
    """Name the arms, given by their texts."""
    rows = tuple(replace(row, arm=names[row.text]) for row in comparison.rows)
    return replace(comparison, rows=rows)


def _list_commands(comparison: Comparison) -> dict[str, str]:
    return {row.arm: row.text for row in comparison.rows}


def _read_arms(folder: Path, comparison: Comparison) -> tuple[ArmRuns, ...]:
    arms = []
    for index, row in enumerate(comparison.rows):
        seeds = range(comparison.seeds)
        folders = [study_files.get_run_folder(folder, row.text, seed) for seed in seeds]
        runs = tuple(read_run(each) for each in folders if is_run(each))
        arms.append(ArmRuns(row.arm, index, runs))
    return tuple(arms)


def _first_config(arms: tuple[ArmRuns, ...]) -> dict[str, Any]:
    return next((run.config for arm in arms for run in arm.runs), {})


def _collect_sensitivities(
    comparison: Comparison,
    default_lr: float | None,
    names: Mapping[str, str],
    chosen: Mapping[str, float] | None = None,
    min_rates: int = 2,
) -> tuple[Sensitivity, ...]:
    """Group the arms by everything but lr; keep groups with enough learning rates.

    Arms that name no lr have `default_lr`; None is each optimizer's own. `names` has the names of
    the groups by the arms' texts without lr, and `chosen` the chosen learning rates by those names.
    """
    trials: dict[str, list[Trial]] = {}
    indices: dict[str, int] = {}
    for index, row in enumerate(comparison.rows):
        try:
            lr = Contender.parse(row.text).arm.lr(default_lr)
        except (UsageError, TypeError, ValueError):
            continue  # not an arm this version knows
        text = _without_lr(row.text)
        name = names.get(text, text)
        done, scores = len(row.runs), finite_values(run.score for run in row.runs.values())
        missing, diverged = comparison.seeds - done, done - len(scores)
        trial = Trial(lr, tuple(scores), diverged, missing)
        trials.setdefault(name, []).append(trial)
        indices.setdefault(name, index)
    found = []
    for name, group in trials.items():
        if len({trial.lr for trial in group}) >= min_rates:
            ascending = tuple(sorted(group, key=lambda trial: trial.lr))
            best = (chosen or {}).get(name)
            found.append(Sensitivity(name, indices[name], ascending, best, comparison.metric))
    return tuple(found)


def _find_source(text: str) -> str:
    """Return what an arm names instead of a learning rate, which may be another arm."""
    try:
        return str(dict(Contender.parse(text).arm.options).get("lr", ""))
    except UsageError:  # not an arm this version knows
        return ""


def _without_lr(text: str) -> str:
    """Return an arm's name without its lr, which in a sweep may be a range."""
    try:
        return Contender.parse(text).name_without_lr
    except UsageError:  # not an arm this version knows
        return text
