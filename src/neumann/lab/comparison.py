"""A comparison in its folder: begun, read, and what it found; nothing here trains.

comparison.json      the arms, the number of seeds, the target, and the settings all runs share
ARM/seed-N/          the records of one training (see records)

A comparison may be read at any moment: trainings that have not finished are missing from the rows.
One that diverged is a result: it is counted, named and left out of the means. It has the arms and
seeds that were asked for last: trainings of others stay in the folder, are counted among what the
notes say, and are there when they are asked for again. UsageError where a folder holds something
else, or a comparison with other settings; nothing is written over.
"""

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from neumann.lab import plain_json
from neumann.lab.config import KEEPING, RatedSettings
from neumann.lab.defaults import completed
from neumann.lab.differences import difference_of
from neumann.lab.errors import UsageError
from neumann.lab.files import reason, write_aside
from neumann.lab.naming import plain_name
from neumann.lab.reading import (
    CONFIG,
    SUMMARY,
    RecordsError,
    read_metrics,
    read_object,
    read_summary,
)
from neumann.lab.statistics import (
    Difference,
    Interval,
    common_seeds,
    mean_interval,
    paired_difference,
    verdict,
)
from neumann.lab.studies import CompareConfig
from neumann.optim.phases import Phase

COMPARISON, SWEEP = "comparison.json", "sweep.json"
UNCORRECTED = "p values are not corrected for multiple comparisons"


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
    warmup: int | None  # steps of a training, where all of them were a Neumann arm's warm-up


@dataclass(frozen=True)
class Comparison:
    """The outcome so far; the first row is the arm that the others are held against."""

    folder: Path
    rows: tuple[Row, ...]
    seeds: int  # wanted of each arm
    target: float | None  # %
    hidden: int  # trainings that have ended, of arms and seeds that are not wanted now

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

    @property
    def tests(self) -> int:
        """How many p values there are."""
        differences = [row.difference for row in self.rows if row.difference is not None]
        return sum(difference.p is not None for difference in differences)

    def limits(self) -> list[str]:
        """Sentences about what the rows do not show."""
        said = [warmup_note(row.arm, row.warmup) for row in self.rows if row.warmup is not None]
        if self.hidden:
            things, verb = ("training", "is") if self.hidden == 1 else ("trainings", "are")
            said.append(f"{self.hidden} finished {things} in {self.folder} {verb} not shown")
        return said

    def notes(self) -> list[str]:
        """What to keep in mind about the verdicts, a sentence each."""
        return [*self.limits(), *([UNCORRECTED] if self.tests > 1 else [])]


def is_comparison(folder: Path) -> bool:
    """Whether a comparison was begun here."""
    return (Path(folder) / COMPARISON).is_file()


def run_folder(folder: Path, arm: str, seed: int) -> Path:
    """Where a comparison keeps one of its trainings."""
    return Path(folder) / plain_name(arm) / f"seed-{seed}"


def refuse_another(config: CompareConfig, folder: Path) -> None:
    """Refuse a folder with something else, or a comparison whose trainings share other settings."""
    refuse_others(folder, COMPARISON)
    if not is_comparison(folder):
        return
    there, here = read_object(folder / COMPARISON).get("settings"), _settings(config)
    if isinstance(there, dict):
        there = completed(there, here, RatedSettings().as_dict())
    difference = difference_of(plain_json.encode(there), plain_json.encode(here))
    if difference:
        raise UsageError(
            f"{folder} holds a comparison with other settings: {difference}; choose another "
            "folder, or remove this one"
        )


def write_down(config: CompareConfig, folder: Path) -> None:
    """Begin a comparison in a folder, or go on with the one there."""
    content = {
        "arms": config.arms,
        "seeds": config.seeds,
        "target": config.target,
        "settings": _settings(config),
    }
    write_object(folder / COMPARISON, content)


def _settings(config: CompareConfig) -> dict[str, Any]:
    """What all its trainings share."""
    names = {field.name for field in fields(RatedSettings)} - set(KEEPING)
    return {key: value for key, value in config.as_dict().items() if key in names}


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
    folder = Path(folder)
    content = read_object(folder / COMPARISON)
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
                _warmup(arm, runs),
            )
        )
    shown = {run.folder for row in rows for run in row.runs.values()}
    ended = {summary.parent for summary in folder.glob(f"*/seed-*/{SUMMARY}")}
    return Comparison(folder, tuple(rows), seeds, target, len(ended - shown))


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


def only_warmed_up(lines: Iterable[dict[str, Any]]) -> int | None:
    """The steps of a training, from its lines, if all of them were Neumann's warm-up; else None."""
    told = [line for line in lines if isinstance(line.get("optimizer"), dict)]
    if not told or told[-1]["optimizer"].get("phase") != Phase.WARMUP:
        return None
    step: int = told[-1].get("step", 0)
    return step


def warmup_note(arm: str, steps: int) -> str:
    """In words."""
    return f"{arm}: all {steps} steps were its SGD warm-up; the Neumann iteration never began"


def _warmup(arm: str, runs: dict[int, Finished]) -> int | None:
    """By the first of its trainings that did not diverge: a seed changes nothing about it."""
    sound = next((run for run in runs.values() if math.isfinite(run.accuracy)), None)
    if sound is None or arm.partition(":")[0] != "neumann":
        return None
    with contextlib.suppress(RecordsError):  # damaged lines are no reason to show nothing
        return only_warmed_up(read_metrics(sound.folder))
    return None
