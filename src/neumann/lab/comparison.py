"""What a comparison found, read from its folder; nothing here trains.

comparison.json      the arms, the number of seeds, the target, and the settings all runs share
ARM/seed-N/          the records of one training (see records)

A comparison may be read at any moment: trainings that have not finished are missing from the rows.
One that diverged is a result: it is counted, named and left out of the means.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neumann.lab.config import plain_name
from neumann.lab.reading import read_object, read_summary
from neumann.lab.statistics import (
    Difference,
    Interval,
    common_seeds,
    mean_interval,
    paired_difference,
    verdict,
)

COMPARISON = "comparison.json"


@dataclass(frozen=True)
class Finished:
    """One training that has ended."""

    folder: Path
    accuracy: float  # %; NaN where it diverged
    steps_to_target: int | None
    epochs_to_target: float | None
    seconds: float | None  # of training; None where it diverged


@dataclass(frozen=True)
class Row:
    """One arm over its seeds."""

    arm: str
    runs: dict[int, Finished]  # by seed; those that have ended
    accuracy: Interval  # %
    difference: Difference | None  # points, first arm minus this one; None for the first
    seconds: float | None  # of training, mean over seeds


@dataclass(frozen=True)
class Comparison:
    """The outcome so far; the first row is the arm that the others are held against."""

    rows: tuple[Row, ...]
    seeds: int  # wanted of each arm
    target: float | None  # %

    @property
    def missing(self) -> int:
        """How many trainings have not ended."""
        return sum(self.seeds - len(row.runs) for row in self.rows)

    def verdicts(self) -> list[str]:
        """A sentence for each other arm."""
        first, *others = self.rows
        return [
            verdict(first.arm, row.arm, row.difference)
            for row in others
            if row.difference is not None
        ]


def is_comparison(folder: Path) -> bool:
    """Whether a comparison was begun here."""
    return (Path(folder) / COMPARISON).is_file()


def run_folder(folder: Path, arm: str, seed: int) -> Path:
    """Where a comparison keeps one of its trainings."""
    return Path(folder) / plain_name(arm) / f"seed-{seed}"


def read(folder: Path) -> Comparison:
    """The comparison as its finished trainings have it."""
    content = read_object(Path(folder) / COMPARISON)
    seeds, target = content["seeds"], content["target"]
    rows: list[Row] = []
    for arm in content["arms"]:
        runs = {
            seed: found
            for seed in range(seeds)
            if (found := _finished(run_folder(folder, arm, seed))) is not None
        }
        accuracies = {seed: run.accuracy for seed, run in runs.items()}
        difference = None
        if rows:
            first = {seed: run.accuracy for seed, run in rows[0].runs.items()}
            difference = paired_difference(*common_seeds(first, accuracies))
        seconds = [run.seconds for run in runs.values() if run.seconds is not None]
        rows.append(
            Row(
                arm,
                runs,
                mean_interval(list(accuracies.values())),
                difference,
                sum(seconds) / len(seconds) if seconds else None,
            )
        )
    return Comparison(tuple(rows), seeds, target)


def _finished(folder: Path) -> Finished | None:
    summary: dict[str, Any] | None = read_summary(folder)
    if summary is None:
        return None
    return Finished(
        folder,
        float(summary.get("accuracy", math.nan)),
        summary.get("steps_to_target"),
        summary.get("epochs_to_target"),
        summary.get("seconds"),
    )
