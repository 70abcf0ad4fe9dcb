"""Read a comparison from its folder, at any time, and summarize each arm.

The rows show the finished runs of the arms and seeds of the last command. A run that diverged is
counted and named, but left out of the means.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from neumann.lab.contenders import get_name
from neumann.lab.metrics import ACCURACY, Metric, Quantity, choose_metric
from neumann.lab.storage import reading
from neumann.lab.storage.run_files import Summary, read_run_files
from neumann.lab.studies import statistics
from neumann.lab.studies.statistics import Difference, Interval
from neumann.lab.studies.study_files import get_run_folder, read_comparison_file
from neumann.lab.studies.wording import (
    CORRECTED,
    LongWarmup,
    describe_difference,
    describe_warmup_of_arm,
)
from neumann.optim.phases import Phase


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended, by finishing or by diverging."""

    folder: Path
    metric: Metric  # what it is scored by
    score: float  # NaN if it diverged
    steps_to_target: int | None
    epochs_to_target: float | None
    seconds: float | None  # of training; None if it diverged
    extras: Mapping[str, float] = field(default_factory=dict)  # of the metric, by key


@dataclass(frozen=True)
class ArmResult:
    arm: str  # its name
    text: str  # as the command wrote it
    runs: dict[int, FinishedRun]  # by seed
    score: Interval  # in the unit of the metric
    # by how much the reference is better, with p corrected for the arms beside it; None for it
    difference: Difference | None
    seconds: float | None  # of training, mean over seeds
    long_warmup: LongWarmup | None  # if most of a Neumann run was its warm-up
    extras: Mapping[str, Interval] = field(default_factory=dict)  # of the metric, by key


@dataclass(frozen=True)
class Comparison:
    """A comparison as far as it has got. All other arms are compared with one, the reference."""

    folder: Path
    rows: tuple[ArmResult, ...]
    seeds: int  # requested for each arm; fewer may have finished
    target: float | None  # in the unit of the metric
    hidden: int  # finished runs of arms and seeds that were not requested
    metric: Metric = ACCURACY
    reference: int = 0  # the index of the arm

    def compare_with(self, reference: int) -> "Comparison":
        """Return the same comparison with another arm as the reference."""
        base = self.rows[reference].runs
        found = statistics.correct_differences(
            [
                None if i == reference else _compare(base, row.runs)
                for i, row in enumerate(self.rows)
            ]
        )
        rows = tuple(
            replace(row, difference=each) for row, each in zip(self.rows, found, strict=True)
        )
        return replace(self, rows=rows, reference=reference)

    @property
    def extras(self) -> list[Quantity]:
        """The quantities beside the score that any run has."""
        return [e for e in self.metric.extras if any(e.key in row.extras for row in self.rows)]

    @property
    def missing(self) -> int:
        return sum(self.seeds - len(row.runs) for row in self.rows)

    @property
    def p_value_count(self) -> int:
        return sum(row.difference is not None and row.difference.p is not None for row in self.rows)

    def state_verdicts(self) -> list[str]:
        """One sentence for each arm but the reference."""
        first = self.rows[self.reference].arm
        return [
            describe_difference(first, row.arm, row.difference, self.metric)
            for row in self.rows
            if row.difference
        ]

    def state_limits(self) -> list[str]:
        """Sentences about what the rows do not show."""
        sentences = [
            describe_warmup_of_arm(row.arm, row.long_warmup)
            for row in self.rows
            if row.long_warmup is not None
        ]
        if self.hidden:
            runs, verb = ("run", "is") if self.hidden == 1 else ("runs", "are")
            sentences.append(f"{self.hidden} finished {runs} in {self.folder} {verb} not shown")
        return sentences

    def state_notes(self) -> list[str]:
        """The limits, and how p values are corrected if there are several."""
        return [*self.state_limits(), *([CORRECTED] if self.p_value_count > 1 else [])]


def read_comparison(folder: Path) -> Comparison:
    content = read_comparison_file(folder)
    seeds, target = content["seeds"], content["target"]
    metric = choose_metric(content.get("settings", {}))
    rows = tuple(_summarize_arm(folder, arm, seeds, metric) for arm in content["arms"])
    shown = {run.folder for row in rows for run in row.runs.values()}
    finished = {summary.parent for summary in folder.glob(f"*/seed-*/{reading.SUMMARY}")}
    found = Comparison(folder, rows, seeds, target, len(finished - shown), metric)
    return found.compare_with(found.reference)


def _summarize_arm(folder: Path, arm: str, seeds: int, metric: Metric) -> ArmResult:
    runs = {
        seed: run
        for seed in range(seeds)
        if (run := read_finished_run(get_run_folder(folder, arm, seed), metric)) is not None
    }
    score = statistics.mean_interval([run.score for run in runs.values()])
    extras = {
        extra.key: statistics.mean_interval(found)
        for extra in metric.extras
        if (found := [run.extras[extra.key] for run in runs.values() if extra.key in run.extras])
    }
    times = [run.seconds for run in runs.values() if run.seconds is not None]
    seconds = sum(times) / len(times) if times else None
    warmup = _find_arm_warmup(arm, runs)
    return ArmResult(get_name(arm), arm, runs, score, None, seconds, warmup, extras)


def _compare(a: dict[int, FinishedRun], b: dict[int, FinishedRun]) -> Difference:
    pairs = statistics.select_common_seeds(_list_gains(a), _list_gains(b))
    return statistics.paired_difference(*pairs)


def _list_gains(runs: dict[int, FinishedRun]) -> dict[int, float]:
    return {seed: run.metric.gain(run.score) for seed, run in runs.items()}


def read_finished_run(folder: Path, metric: Metric) -> FinishedRun | None:
    """Read the result of a run, or None if it has not ended."""
    if not reading.is_finished(folder):
        return None
    result = read_run_files(folder).result
    if not isinstance(result, Summary):
        return FinishedRun(folder, metric, math.nan, None, None, None)
    rest = result.steps_to_target, result.epochs_to_target, result.seconds
    found = {extra.key: getattr(result, extra.key) for extra in metric.extras}
    extras = {key: float(value) for key, value in found.items() if value is not None}
    return FinishedRun(folder, metric, float(getattr(result, metric.key)), *rest, extras)


def find_long_warmup(lines: Iterable[dict[str, Any]]) -> LongWarmup | None:
    """Return the warm-up of a Neumann run if it covers more than half of the steps."""
    warmup = total = 0
    for line in lines:
        if line.get("kind") == "timetable":
            warmup = line.get("warmup_steps", 0)
        if isinstance(line.get("optimizer"), dict):
            total = line.get("step", 0)
            if line["optimizer"].get("phase") == Phase.WARMUP:
                warmup = max(warmup, total)  # runs of version 0.1 have no timetable
    return LongWarmup(min(warmup, total), total) if 2 * warmup > total > 0 else None


def _find_arm_warmup(arm: str, runs: dict[int, FinishedRun]) -> LongWarmup | None:
    # All seeds have the same phases, so the first run that did not diverge speaks for the arm.
    run = next((run for run in runs.values() if math.isfinite(run.score)), None)
    if run is None or "neumann" not in arm:
        return None
    return find_long_warmup(reading.read_metrics(run.folder))
