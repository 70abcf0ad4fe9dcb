"""Several optimizers over the same seeds.

A seed gives every arm the same initial weights, data order and augmentation, so the arms are
compared pair by pair. Each training has a folder of its own; one that is finished is never
repeated, one that was interrupted goes on. Seeds and arms may be added to a comparison later;
whatever else all its trainings share stays as it was.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields
from multiprocessing import get_context
from pathlib import Path

from neumann.lab import plain_json
from neumann.lab.comparison import COMPARISON, Comparison, is_comparison, read, run_folder
from neumann.lab.config import KEEPING, CompareConfig, Settings, TrainConfig
from neumann.lab.data import Dataset
from neumann.lab.differences import difference_of
from neumann.lab.errors import UsageError
from neumann.lab.files import reason, write_aside
from neumann.lab.processes import Process
from neumann.lab.reading import is_finished, read_object
from neumann.lab.training import Diverged, Observer, Training, open_dataset

Done = Callable[[str, int], None]  # called with arm and seed of each training that has ended


def compare(
    config: CompareConfig,
    folder: Path,
    observe: Observer = lambda line: None,
    done: Done = lambda arm, seed: None,
) -> Comparison:
    """Train what is not trained yet, and compare. `observe` sees the lines of single jobs only."""
    config.check()
    runs = {
        (arm, seed): config.run(arm, seed, run_folder(folder, arm, seed))
        for seed, arm in _order(config)
    }
    _write_down(config, folder)
    waiting = {key: run for key, run in runs.items() if not is_finished(_output(run))}
    for key in runs.keys() - waiting.keys():
        done(*key)
    if config.jobs == 1:
        dataset: Dataset | None = None
        for key, run in waiting.items():
            dataset = dataset or open_dataset(run)  # the runs differ in nothing that it is made of
            train(run, dataset, observe)
            done(*key)
    else:
        # Fresh processes: a forked one could not use a GPU that its parent has touched.
        with ProcessPoolExecutor(config.jobs, mp_context=get_context("spawn")) as pool:
            futures = {pool.submit(train, run): key for key, run in waiting.items()}
            for future in as_completed(futures):
                future.result()
                done(*futures[future])
    return read(folder)


def train(
    config: TrainConfig, dataset: Dataset | None = None, observe: Observer | None = None
) -> None:
    """One training, to its end or its divergence."""
    training = Training(config, Process(), dataset)
    with contextlib.suppress(Diverged):  # the summary says so
        training.run(_output(config), observe or (lambda line: None))


def _write_down(config: CompareConfig, folder: Path) -> None:
    """Keep what is compared; refuse a folder whose trainings share other settings."""
    names = {field.name for field in fields(Settings)} - set(KEEPING)
    settings = {key: value for key, value in config.as_dict().items() if key in names}
    if is_comparison(folder):
        there = read_object(folder / COMPARISON).get("settings")
        difference = difference_of(plain_json.encode(there), plain_json.encode(settings))
        if difference:
            raise UsageError(
                f"{folder} holds a comparison with other settings: {difference}; choose another "
                "folder, or remove this one"
            )
    content = {
        "arms": config.arms,
        "seeds": config.seeds,
        "target": config.target,
        "settings": settings,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_aside(folder / COMPARISON, [plain_json.dumps(content, indent=2)])
    except OSError as error:
        raise UsageError(f"cannot start a comparison in {folder}: {reason(error)}") from error


def _order(config: CompareConfig) -> Iterator[tuple[int, str]]:
    """Seed by seed, so that a comparison cut short has whole pairs."""
    for seed in range(config.seeds):
        for arm in config.arms:
            yield seed, arm


def _output(run: TrainConfig) -> Path:
    assert run.output is not None
    return run.output
