"""Runs as their records show them, whatever state they were left in, grouped by arm.

A value that is missing or not a number is NaN, which a plot shows as a gap. Errors are those of
`storage.reading`: UsageError if a folder is not a run's, RecordsError if a file is damaged.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from neumann.lab.contenders import Contender
from neumann.lab.errors import UsageError
from neumann.lab.storage import reading
from neumann.lab.storage.run_files import RunFiles, check_lines, read_run_files
from neumann.lab.training.checkpoints import Checkpoints
from neumann.lab.training.records import CHECKPOINTS

LARGEST = 1e30  # a loss above this counts as infinite; axes would overflow

Series = dict[int, float]  # value by optimizer step
Reader = Callable[["Run"], Series]


@dataclass(frozen=True)
class Phases:
    """When a Neumann run warmed up and reset, in steps of the run counted from 1."""

    warmup_steps: int  # 0: there was no warm-up
    resets: tuple[int, ...]  # up to the last recorded step
    complete: bool = True  # False: the records may not mention every reset


@dataclass(frozen=True)
class Run:
    seed: int
    config: dict[str, Any]
    environment: dict[str, Any]
    lines: tuple[dict[str, Any], ...]  # of the metrics
    summary: dict[str, Any] | None  # None: it has not finished

    @property
    def diverged(self) -> dict[str, Any] | None:
        """Step, lr and checkpoint of a run that ended because its loss was not finite."""
        failure = (self.summary or {}).get("diverged")
        return failure if isinstance(failure, dict) else None

    @property
    def settings(self) -> dict[str, Any]:
        """The config, with each option of the optimizer as a setting of its own.

        The config knows best which learning rate was used; an option comes before other settings of
        its name, such as the weight decay.
        """
        try:
            arm = Contender.parse(str(self.config.get("opt", ""))).arm
        except (UsageError, TypeError, ValueError):  # not an arm this version knows
            return self.config
        own = {"opt": arm.name, **dict(arm.options), "lr": self.config.get("lr")}
        return own | {key: value for key, value in self.config.items() if key not in own}

    @property
    def last_step(self) -> int:
        return max((step_of(line) for line in self.lines), default=0)

    @cached_property
    def steps_per_epoch(self) -> int | None:
        """None before the first line that names a step and its epoch."""
        for line in self.lines:
            epoch = to_number(line.get("epoch"))
            if epoch > 0 and step_of(line) > 0:
                return max(round(step_of(line) / epoch), 1)
        return None

    def series(self, kind: str, name: str) -> Series:
        """Return one number from every line of a kind; "epoch" includes evaluations inside it."""
        kinds = (kind, "evaluation") if kind == "epoch" else (kind,)
        return {
            step_of(line): to_number(line[name])
            for line in self.lines
            if line.get("kind") in kinds and line.get(name) is not None
        }

    def spectra(self, batch: str) -> dict[int, Mapping[str, float]]:
        """Return what was measured of the Hessian on a batch, by step; flags are 0 and 1."""
        lines = [line for line in self.lines if line.get("kind") == "spectrum"]
        return {step_of(line): _read_numbers(line.get(batch)) for line in lines}

    @cached_property
    def clock(self) -> list[tuple[int, float]]:
        """(step, seconds of training) from the start on, wherever seconds are recorded."""
        found = [(step_of(line), to_number(line.get("seconds"))) for line in self.lines]
        known = {0: 0.0} | {step: seconds for step, seconds in found if math.isfinite(seconds)}
        return sorted(known.items())

    def seconds_at(self, step: int) -> float:
        """Interpolate the seconds of training up to a step; NaN if no time was recorded."""
        if len(self.clock) < 2:
            return math.nan
        # After the last known time, extrapolate at the last pace.
        right = bisect_left(self.clock, step, key=lambda known: known[0])
        right = min(max(right, 1), len(self.clock) - 1)
        (step_a, seconds_a), (step_b, seconds_b) = self.clock[right - 1 : right + 1]
        return seconds_a + (seconds_b - seconds_a) * (step - step_a) / (step_b - step_a)

    @cached_property
    def phases(self) -> Phases | None:
        """The phases so far; None if nothing about them is recorded.

        A Neumann run records its timetable in one line. Older records lack that line; then the
        step lines still give the end of the warm-up and the first reset after each of them.
        """
        if self.last_step == 0:
            return None
        plan = next(filter(_is_timetable, self.lines), None)
        if plan is not None:
            warmup = plan["warmup_steps"]
            resets = {step for step in plan["resets"] if isinstance(step, int)}
        elif self._diagnostics:
            resets = set[int]().union(*(_implied_resets(report) for _, report in self._diagnostics))
            warmup = min(resets, default=self.last_step + 1) - 1
        else:
            return None
        reached = (self._run_step(step) for step in sorted(resets))
        return Phases(
            min(self._run_step(warmup), self.last_step),
            # In the first step there is nothing to reset.
            tuple(step for step in reached if 1 < step <= self.last_step),
            complete=plan is not None,
        )

    @cached_property
    def _diagnostics(self) -> list[tuple[int, dict[str, Any]]]:
        """(step of the run, what the optimizer reported about its own step and phase)."""
        return [
            (step, report)
            for step, report in self.reports
            if isinstance(report.get("step"), int) and "phase" in report
        ]

    @property
    def reports(self) -> list[tuple[int, dict[str, Any]]]:
        """(step of the run, what the optimizer reported)."""
        found = [(step_of(line), line.get("optimizer")) for line in self.lines]
        return [(step, report) for step, report in found if isinstance(report, dict)]

    def _run_step(self, optimizer_step: int) -> int:
        """Convert a step of the optimizer, whose clock omits skipped steps, to one of the run."""
        if not self._diagnostics:
            return optimizer_step
        after = bisect_left(self._diagnostics, optimizer_step, key=lambda line: line[1]["step"])
        run_step, report = self._diagnostics[min(after, len(self._diagnostics) - 1)]
        skipped: int = run_step - report["step"]
        return optimizer_step + skipped


def _read_numbers(measured: Any) -> Mapping[str, float]:
    numbers = defaultdict[str, float](lambda: math.nan)
    for name, value in measured.items() if isinstance(measured, dict) else ():
        # An unbounded error reaches as far as the axis goes.
        known = LARGEST if value == math.inf else value
        numbers[name] = float(known) if isinstance(known, bool) else to_number(known)
    return numbers


def _is_timetable(line: dict[str, Any]) -> bool:
    return (
        line.get("kind") == "timetable"
        and isinstance(line.get("warmup_steps"), int)
        and isinstance(line.get("resets"), list)
    )


def _implied_resets(report: dict[str, Any]) -> set[int]:
    """Return the resets that one line implies, in steps of the optimizer."""
    step, t, to_reset = report["step"], report.get("t"), report.get("steps_to_reset")
    resets = {step} if report["phase"] == "reset" else set()
    if isinstance(to_reset, int):
        resets.add(step + to_reset)
    if isinstance(t, int) and t > 0:
        resets.add(step - t + 1)  # t = 1 is the first reset
    return resets


@dataclass(frozen=True)
class ArmRuns:
    """An arm and those of its runs that have started."""

    name: str
    index: int  # among the arms; it determines the color
    runs: tuple[Run, ...]

    @property
    def averaged(self) -> tuple[Run, ...]:
        """The runs that go into means: the finished ones, or if there are none, those underway."""
        healthy = [run for run in self.runs if run.diverged is None]
        finished = [run for run in healthy if run.summary is not None]
        return tuple(finished or healthy)

    @property
    def diverged(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.diverged is not None)


def is_run(folder: Path) -> bool:
    """Whether a run was started in this folder."""
    return (Path(folder) / reading.CONFIG).is_file()


def read_run(folder: Path) -> Run:
    files = read_run_files(folder)
    if files.summary is None:
        _check_unfinished(files, folder)
    seed = files.config.get("seed", 0)
    return Run(seed, files.config, files.environment, tuple(files.lines), files.summary)


def _check_unfinished(files: RunFiles, folder: Path) -> None:
    """Raise a RecordsError if the metrics end before the last intact checkpoint."""
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    for step in reversed(checkpoints.list_steps()):
        try:
            check_lines(files.lines, files.config, step, None, folder / reading.METRICS)
            return
        except reading.RecordsError:
            if checkpoints.is_intact(step):  # otherwise the run has gone back to an earlier one
                raise


def to_number(value: Any) -> float:
    """Return the value if it is a number that can be drawn, else NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) <= LARGEST else math.nan


def step_of(line: dict[str, Any]) -> int:
    step = line.get("step")
    return step if isinstance(step, int) else 0


def finite_values(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
