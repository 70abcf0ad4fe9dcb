"""Run a comparison: several optimizers over the same seeds.

A seed gives every arm the same initial weights, data order and augmentation, so arms are compared
in pairs. Called again with the same folder, it keeps finished runs, continues interrupted ones, and
trains those of new arms and seeds; any other changed setting is a UsageError. Unusable settings are
a UsageError before anything is written. A signal raises StudyInterrupted once all unfinished runs
have been saved.
"""

from functools import partial
from pathlib import Path

from neumann.lab.data import Dataset
from neumann.lab.storage.reading import CONFIG, is_finished
from neumann.lab.studies import study_files
from neumann.lab.studies.results import Comparison, read_comparison, read_finished_run
from neumann.lab.studies.settings import CompareConfig
from neumann.lab.studies.study_files import get_run_folder
from neumann.lab.studies.workers import (
    RunKey,
    Runs,
    StudyObserver,
    get_output_folder,
    train_run,
    train_side_by_side,
)
from neumann.lab.training.inputs import open_dataset
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process
from neumann.lab.training.records import check_same_config
from neumann.lab.training.signals import Interrupted, signal_number


class StudyInterrupted(Interrupted):
    """Many runs were asked to stop. Finished ones are kept, and running ones have saved."""

    def __init__(self, number: int, ended: int, total: int, folder: Path) -> None:
        again = f"the same command with --output {folder} continues"
        super().__init__(number, f"after {ended} of {total} runs; {again}")
        self.ended, self.total = ended, total


def run_comparison(
    config: CompareConfig, folder: Path, observer: StudyObserver | None = None
) -> Comparison:
    """Train the runs that are not finished yet, and compare the arms."""
    dataset = check_trainable(config, folder)
    if config.jobs > 1:
        dataset = None  # every worker opens its own
    observer = observer or StudyObserver()
    with study_files.lock_folder(folder):
        runs = _plan_runs(config, folder)
        study_files.check_comparison_folder(folder, config)
        _check_existing_runs(runs)
        study_files.write_comparison(folder, config)
        unfinished = {
            key: run for key, run in runs.items() if not is_finished(get_output_folder(run))
        }
        observer.on_start(len(runs) - len(unfinished), len(runs))
        try:
            _train_all(unfinished, config.jobs, dataset, observer)
        except (Interrupted, KeyboardInterrupt) as stop:
            number = stop.number if isinstance(stop, Interrupted) else signal_number(stop)
            ended = sum(is_finished(get_output_folder(run)) for run in runs.values())
            raise StudyInterrupted(number, ended, len(runs), folder) from None
        return read_comparison(folder)


def check_trainable(config: CompareConfig, folder: Path) -> Dataset | None:
    """Build the first run of every new arm, to find unusable settings before anything is written.

    Returns the data set, if it was loaded for that.
    """
    config.check()
    dataset: Dataset | None = None
    for (_, seed), run in _plan_runs(config, folder).items():
        if seed == 0 and not get_output_folder(run).exists():
            dataset = dataset or open_dataset(run)
            Training(run, Process(), dataset)
    return dataset


def _plan_runs(config: CompareConfig, folder: Path) -> Runs:
    """List all runs, seed by seed, so that a comparison that stops early has complete pairs."""
    return {
        (arm, seed): config.make_run_config(arm, seed, get_run_folder(folder, arm, seed))
        for seed in range(config.seeds)
        for arm in config.arms
    }


def _check_existing_runs(runs: Runs) -> None:
    for run in runs.values():
        if (get_output_folder(run) / CONFIG).exists():
            check_same_config(get_output_folder(run), run.as_record())


def _train_all(runs: Runs, jobs: int, dataset: Dataset | None, observer: StudyObserver) -> None:
    def announce(key: RunKey) -> None:
        result = read_finished_run(get_output_folder(runs[key]), runs[key].metric)
        if result is not None:
            observer.on_finish(*key, result)

    if jobs > 1:
        train_side_by_side(runs, jobs, observer, announce)
        return
    for key, run in runs.items():
        dataset = dataset or open_dataset(run)  # all runs use the same data
        train_run(run, dataset, partial(observer.on_line, *key))
        announce(key)
