"""Several optimizers over the same seeds, and what can be said of their difference.

A seed gives every arm the same initial weights, data order and augmentation, so the arms are
compared pair by pair. Each training has a folder of its own; one that is finished is never
repeated, one that was interrupted goes on. A training that diverged is a result: it is counted,
named and left out of the means.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from neumann.lab.config import CompareConfig, TrainConfig
from neumann.lab.data import Dataset
from neumann.lab.processes import Process
from neumann.lab.reading import read_summary
from neumann.lab.statistics import (
    Difference,
    Interval,
    mean_interval,
    paired_difference,
    verdict,
)
from neumann.lab.training import Diverged, Observer, Training, open_dataset

Done = Callable[[str, int], None]  # called with arm and seed of each training that has ended


@dataclass(frozen=True)
class Row:
    """One arm over all seeds."""

    arm: str
    accuracies: tuple[float, ...]  # %, by seed; NaN where it diverged
    accuracy: Interval  # %
    difference: Difference | None  # points, first arm minus this one; None for the first
    steps_to_target: tuple[int | None, ...]  # by seed
    seconds: float | None  # of training, mean over seeds


@dataclass(frozen=True)
class Comparison:
    """The outcome of a comparison; the first row is the arm that the others are held against."""

    rows: tuple[Row, ...]

    def verdicts(self) -> list[str]:
        """A sentence for each other arm."""
        first, *others = self.rows
        return [
            verdict(first.arm, row.arm, row.difference)
            for row in others
            if row.difference is not None
        ]


def compare(
    config: CompareConfig,
    folder: Path,
    observe: Observer = lambda line: None,
    done: Done = lambda arm, seed: None,
) -> Comparison:
    """Train what is not trained yet, and compare. `observe` sees the lines of single jobs only."""
    config.check()
    runs = {(arm, seed): config.run(arm, seed, folder) for seed, arm in _order(config)}
    waiting = {key: run for key, run in runs.items() if not _is_finished(run)}
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
    return read(config, folder)


def train(
    config: TrainConfig, dataset: Dataset | None = None, observe: Observer | None = None
) -> None:
    """One training, to its end or its divergence."""
    assert config.output is not None
    training = Training(config, Process(), dataset)
    with contextlib.suppress(Diverged):  # the summary says so
        training.run(config.output, observe or (lambda line: None))


def read(config: CompareConfig, folder: Path) -> Comparison:
    """The comparison as its finished trainings have it."""
    rows: list[Row] = []
    for arm in config.arms:
        summaries = [_summary(config.run(arm, seed, folder)) for seed in range(config.seeds)]
        accuracies = tuple(float(s.get("accuracy", math.nan)) for s in summaries)
        seconds = [float(s["seconds"]) for s in summaries if "seconds" in s]
        rows.append(
            Row(
                arm,
                accuracies,
                mean_interval(accuracies),
                paired_difference(rows[0].accuracies, accuracies) if rows else None,
                tuple(s.get("steps_to_target") for s in summaries),
                sum(seconds) / len(seconds) if seconds else None,
            )
        )
    return Comparison(tuple(rows))


def _order(config: CompareConfig) -> Iterator[tuple[int, str]]:
    """Seed by seed, so that a comparison cut short has whole pairs."""
    for seed in range(config.seeds):
        for arm in config.arms:
            yield seed, arm


def _is_finished(run: TrainConfig) -> bool:
    assert run.output is not None
    return read_summary(run.output) is not None


def _summary(run: TrainConfig) -> dict[str, Any]:
    assert run.output is not None
    found = read_summary(run.output)
    if found is None:
        raise RuntimeError(f"{run.output} has not finished")
    return found
