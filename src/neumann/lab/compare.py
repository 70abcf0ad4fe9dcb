"""Several optimizers over the same seeds.

A seed gives every arm the same initial weights, data order and augmentation, so the arms are
compared pair by pair. Each training has a folder of its own; one that is finished is never
repeated, one that was interrupted goes on. Seeds and arms may be added to a comparison later, or
left out (see comparison); whatever else all its trainings share stays as it was, also what
"automatic" means: a training that was begun with other settings is refused.

One job trains in this process; more of them each keep a process, which takes one training after
the other, so data are opened and models compiled once a process. Such a process ends as soon as
its parent has. Stopped by a signal, trainings under way save themselves and ComparisonInterrupted
is raised. UsageError before anything is written for what no training could use, and for a folder
that another process uses; CrashedError where a process died, with what is finished kept.
"""

from functools import partial
from pathlib import Path
from typing import Any

from neumann.lab.comparison import (
    Comparison,
    read,
    refuse_another,
    run_folder,
    write_down,
)
from neumann.lab.config import KEEPING, TrainConfig
from neumann.lab.data import Dataset
from neumann.lab.errors import UsageError
from neumann.lab.files import reason
from neumann.lab.interruption import (
    ComparisonInterrupted,
    Interrupted,
    number_of,
)
from neumann.lab.locks import Claim
from neumann.lab.opening import open_dataset
from neumann.lab.processes import Process
from neumann.lab.reading import CONFIG, is_finished
from neumann.lab.records import refuse_another as refuse_another_run
from neumann.lab.studies import CompareConfig
from neumann.lab.training import Training
from neumann.lab.workers import Runs, Watch, output, side_by_side, tell, train


def compare(config: CompareConfig, folder: Path, watch: Watch | None = None) -> Comparison:
    """Train what is not trained yet, and compare."""
    dataset = tried(config, folder)
    with claimed(folder):
        return _compare(config, folder, dataset, watch or Watch())


def _compare(
    config: CompareConfig, folder: Path, dataset: Dataset | None, watch: Watch
) -> Comparison:
    runs = _runs(config, folder)
    refuse_another(config, folder)
    for run in runs.values():
        if (output(run) / CONFIG).exists():
            refuse_another_run(output(run), _settings(run))
    write_down(config, folder)
    waiting = {key: run for key, run in runs.items() if not is_finished(output(run))}
    watch.began(len(runs) - len(waiting), len(runs))
    number: int | None = None
    try:
        if config.jobs == 1:
            _one_by_one(waiting, dataset, watch)
        else:
            del dataset  # every process opens its own
            side_by_side(waiting, config.jobs, watch)
    except Interrupted as stopped:
        number = stopped.number
    except KeyboardInterrupt as stopped:
        number = number_of(stopped)
    if number is not None:
        ended = sum(is_finished(output(run)) for run in runs.values())
        raise ComparisonInterrupted(number, ended, len(runs), folder)
    return read(folder)


def claimed(folder: Path) -> Claim:
    """The folder of a comparison or a sweep for this process alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Claim(folder)
    except OSError as error:
        raise UsageError(f"cannot write into {folder}: {reason(error)}") from error


def tried(config: CompareConfig, folder: Path) -> Dataset | None:
    """Refuse what cannot be trained, before anything is written; the data, if they were needed."""
    config.check()
    dataset: Dataset | None = None
    for (_, seed), run in _runs(config, folder).items():
        if seed == 0 and not output(run).exists():
            dataset = dataset or open_dataset(run)
            Training(run, Process(), dataset)
    return dataset


def _one_by_one(runs: Runs, dataset: Dataset | None, watch: Watch) -> None:
    for key, run in runs.items():
        dataset = dataset or open_dataset(run)  # the runs differ in nothing that it is made of
        train(run, dataset, partial(watch.line, *key))
        tell(watch, key, run)


def _runs(config: CompareConfig, folder: Path) -> Runs:
    """Seed by seed, so that a comparison cut short has whole pairs."""
    return {
        (arm, seed): config.run(arm, seed, run_folder(folder, arm, seed))
        for seed in range(config.seeds)
        for arm in config.arms
    }


def _settings(run: TrainConfig) -> dict[str, Any]:
    """As its records have them."""
    return {key: value for key, value in run.as_dict().items() if key not in KEEPING}
