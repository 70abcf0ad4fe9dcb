"""A comparison in its folder: begun, read, and what it found; nothing here trains.

comparison.json      the arms, the number of seeds, the target, and the settings all runs share
ARM/seed-N/          the records of one training (see records)

A comparison may be read at any moment: trainings that have not finished are missing from the rows.
One that diverged is a result: it is counted, named and left out of the means. UsageError where a
folder holds something else, or a comparison with other settings; nothing is written over.
"""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from neumann.lab import plain_json
from neumann.lab.config import KEEPING, CompareConfig, RatedSettings, plain_name
from neumann.lab.differences import difference_of
from neumann.lab.errors import UsageError
from neumann.lab.files import reason, write_aside
from neumann.lab.reading import CONFIG, read_object, read_summary
from neumann.lab.statistics import (
    Difference,
    Interval,
    common_seeds,
    mean_interval,
    paired_difference,
    verdict,
)

COMPARISON, SWEEP = "comparison.json", "sweep.json"


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


def write_down(config: CompareConfig, folder: Path) -> None:
    """Begin a comparison in a folder, or go on with one whose trainings share the settings."""
    names = {field.name for field in fields(RatedSettings)} - set(KEEPING)
    settings = {key: value for key, value in config.as_dict().items() if key in names}
    refuse_others(folder, COMPARISON)
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
    write_object(folder / COMPARISON, content)


def refuse_others(folder: Path, kept: str) -> None:
    """Refuse a folder that holds something else than what is kept in a file of this name."""
    for name, what in ((CONFIG, "a run"), (COMPARISON, "a comparison"), (SWEEP, "a sweep")):
        if name != kept and (folder / name).exists():
            raise UsageError(f"{folder} holds {what} already; choose another folder")


def write_object(path: Path, content: dict[str, Any]) -> None:
    """Put a JSON object into a file, whole or not at all, and make its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_aside(path, [plain_json.dumps(content, indent=2)])
    except OSError as error:
        raise UsageError(f"cannot write {path}: {reason(error)}") from error


def read(folder: Path) -> Comparison:
    """The comparison as its finished trainings have it."""
    content = read_object(Path(folder) / COMPARISON)
    seeds, target = content["seeds"], content["target"]
    rows: list[Row] = []
    for arm in content["arms"]:
        runs = {
            seed: found
            for seed in range(seeds)
            if (found := finished(run_folder(folder, arm, seed))) is not None
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


def finished(folder: Path) -> Finished | None:
    """What came out of a training; None if it has not ended."""
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
