"""Run comparisons: several optimizers over the same seeds.

A seed gives every arm the same initial weights, data order and augmentation, so arms are compared
in pairs. Called again with the same folder, it keeps finished runs, continues interrupted ones, and
trains those of new arms and seeds; any other changed setting is a UsageError. Unusable settings are
a UsageError before anything is written. A signal raises StudyInterrupted once all unfinished runs
have been saved. After --seconds no run starts, and unfinished ones raise OutOfTime.

Several comparisons, such as one for each batch size, train their runs together: seed by seed, so
that a study that stops early has complete pairs.
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from neumann.lab.contenders import get_name
from neumann.lab.data import hash_data
from neumann.lab.storage.reading import CONFIG, is_finished
from neumann.lab.studies import study_files
from neumann.lab.studies.results import Comparison, read_comparison, read_finished_run
from neumann.lab.studies.settings import CompareConfig
from neumann.lab.studies.study_files import get_run_folder
from neumann.lab.studies.workers import (
    SAVED,
    DataCache,
    RunKey,
    Runs,
    StudyObserver,
    Team,
    get_output_folder,
    train_run,
    train_side_by_side,
)
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process, count_processes
from neumann.lab.training.records import check_same_config, check_same_data
from neumann.lab.training.signals import Interrupted, signal_number

Parts = Mapping[Path, CompareConfig]  # comparisons by folder


class StudyInterrupted(Interrupted):
    """Many runs were asked to stop. Finished ones are kept, and running ones have saved."""

    def __init__(self, number: int, ended: int, total: int, folder: Path) -> None:
        again = f"run the same command with --output {folder} to continue"
        super().__init__(number, f"after {ended} of {total} runs; {again}")
        self.ended, self.total = ended, total


class OutOfTime(Exception):
    """The seconds that a study was given are over, and not all of its runs have ended."""

    def __init__(self, ended: int, total: int, folder: Path) -> None:
        again = f"run the same command with --output {folder} to continue"
        super().__init__(f"--seconds ran out after {ended} of {total} runs; {again}")


class Budget:
    """The seconds in which runs may start; None is no limit."""

    def __init__(self, seconds: float | None = None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def is_spent(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end


@dataclass(frozen=True)
class Session:
    """How the runs of a study are trained and watched in one call of a command."""

    observer: StudyObserver = field(default_factory=StudyObserver)
    budget: Budget = field(default_factory=Budget)
    team: Team | None = None  # of torchrun's processes


def run_comparison(
    config: CompareConfig, folder: Path, observer: StudyObserver | None = None
) -> Comparison:
    """Train the runs that are not finished yet, and compare the arms."""
    parts = {folder: config}
    data = check_trainable(parts)
    session = Session(observer or StudyObserver(), Budget(config.seconds))
    (found,) = run_comparisons(parts, folder, session, data)
    return found


def run_comparisons(
    parts: Parts, root: Path, session: Session, data: DataCache | None = None
) -> list[Comparison]:
    """Train the unfinished runs of all parts, whose folders are in `root`, and compare the arms."""
    jobs = next(iter(parts.values())).jobs
    with ExitStack() as stack:
        for folder in parts:
            stack.enter_context(study_files.lock_folder(folder))
        runs = plan_runs(parts, root)
        for folder, config in parts.items():
            study_files.check_comparison_folder(folder, config)
        _check_existing_runs(runs)
        for folder, config in parts.items():
            study_files.write_comparison(folder, config)
        unfinished = {
            key: run for key, run in runs.items() if not is_finished(get_output_folder(run))
        }
        session.observer.on_plan(runs)
        session.observer.on_start(len(runs) - len(unfinished), len(runs))
        try:
            _train_all(unfinished, jobs, data or DataCache(), session)
        except (Interrupted, KeyboardInterrupt) as stop:
            number = stop.number if isinstance(stop, Interrupted) else signal_number(stop)
            raise StudyInterrupted(number, _count_ended(runs), len(runs), root) from None
        if (ended := _count_ended(runs)) < len(runs):
            raise OutOfTime(ended, len(runs), root)
        return [read_comparison(folder) for folder in parts]


def check_trainable(parts: Parts) -> DataCache:
    """Build the first run of every new arm, to find unusable settings before anything is written.

    Returns the data set that was loaded for that. Under torchrun, where this process cannot build
    a run alone, the first step of a run finds the rest.
    """
    data = DataCache()
    for folder, config in parts.items():
        config.check()
        for (_, seed), run in plan_runs({folder: config}, folder).items():
            if seed == 0 and count_processes() == 1 and not get_output_folder(run).exists():
                Training(run, Process(), data.open(run))
    return data


def plan_runs(parts: Parts, root: Path) -> Runs:
    """List all runs, seed by seed. Their keys name the part, unless there is one alone."""
    several, most = len(parts) > 1, max(config.seeds for config in parts.values())
    runs: Runs = {}
    for seed in range(most):
        for folder, config in parts.items():
            place = f"{study_files.describe_part(folder, root)} " if several else ""
            for arm in config.arms if seed < config.seeds else ():
                key = f"{place}{get_name(arm)}", seed
                runs[key] = config.make_run_config(arm, seed, get_run_folder(folder, arm, seed))
    return runs


def _count_ended(runs: Runs) -> int:
    return sum(is_finished(get_output_folder(run)) for run in runs.values())


def _check_existing_runs(runs: Runs) -> None:
    """Refuse runs with another config and, before others are added to them, on another text."""
    begun = [run for run in runs.values() if (get_output_folder(run) / CONFIG).exists()]
    for run in begun:
        check_same_config(get_output_folder(run), run.as_record())
    if begun and _count_ended(runs) < len(runs):
        hashes = {name: hash_data(*name) for name in {(run.data, run.data_dir) for run in begun}}
        for run in begun:
            check_same_data(get_output_folder(run), hashes[run.data, run.data_dir])


def _train_all(runs: Runs, jobs: int, data: DataCache, session: Session) -> None:
    observer, budget, team = session.observer, session.budget, session.team

    def announce(key: RunKey) -> None:
        result = read_finished_run(get_output_folder(runs[key]), runs[key].metric)
        if result is not None:
            observer.on_finish(*key, result)

    if jobs > 1:
        data.close()  # every worker opens its own
        train_side_by_side(runs, jobs, observer, announce, lambda: budget.is_spent)
        return
    for key, run in runs.items():
        if budget.is_spent:
            return
        observe = partial(observer.on_line, *key)
        if team is not None:
            number = team.train(run, observe)
        else:
            number = train_run(run, data.open(run), observe)
        announce(key)
        if number is not None:
            raise Interrupted(number, SAVED)
