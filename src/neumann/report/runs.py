"""One training as its records tell it, in whatever state it was left.

Numbers that are missing, or no numbers, are NaN: a plot leaves a gap there. Fails as `reading`
does: UsageError where the folder is not a run's, RecordsError where a file is damaged.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from neumann.lab.reading import (
    CONFIG,
    read_config,
    read_environment,
    read_metrics,
    read_summary,
)

LARGEST = 1e30  # beyond it a loss is as good as infinite, and axes overflow

Track = dict[int, float]  # a value by optimizer step


@dataclass(frozen=True)
class Run:
    """One training."""

    folder: Path
    seed: int
    config: dict[str, Any]
    environment: dict[str, Any]
    lines: tuple[dict[str, Any], ...]  # of the metrics
    summary: dict[str, Any] | None  # None: it has not ended

    @property
    def diverged(self) -> dict[str, Any] | None:
        """Step, lr and checkpoint of a run that ended because its loss was not finite."""
        found = (self.summary or {}).get("diverged")
        return found if isinstance(found, dict) else None

    @property
    def last_step(self) -> int:
        """The last step that is recorded; 0 if none is."""
        return max((step_of(line) for line in self.lines), default=0)

    @cached_property
    def steps_per_epoch(self) -> int | None:
        """None before the first line."""
        for line in self.lines:
            epoch = number(line.get("epoch"))
            if epoch > 0 and step_of(line) > 0:
                return max(round(step_of(line) / epoch), 1)
        return None

    def track(self, kind: str, name: str) -> Track:
        """A number of all lines of one kind."""
        return {
            step_of(line): number(line[name])
            for line in self.lines
            if line.get("kind") == kind and line.get(name) is not None
        }

    @cached_property
    def clock(self) -> list[tuple[int, float]]:
        """(step, seconds of training), from the beginning, wherever seconds are recorded."""
        known = {0: 0.0}
        for line in self.lines:
            seconds = number(line.get("seconds"))
            if math.isfinite(seconds):
                known[step_of(line)] = seconds
        return sorted(known.items())

    def seconds_at(self, step: int) -> float:
        """Seconds of training up to a step, interpolated; NaN where no clock was recorded."""
        if len(self.clock) < 2:
            return math.nan
        # After the last known time it goes on at the last pace.
        right = bisect_left(self.clock, step, key=lambda known: known[0])
        right = min(max(right, 1), len(self.clock) - 1)
        (first, begun), (last, ended) = self.clock[right - 1 : right + 1]
        return begun + (ended - begun) * (step - first) / (last - first)


def is_run(folder: Path) -> bool:
    """Whether a run was begun here."""
    return (Path(folder) / CONFIG).is_file()


def read_run(folder: Path) -> Run:
    """All that is recorded of a run."""
    config = read_config(folder)
    seed = config.get("seed")
    return Run(
        Path(folder),
        seed if isinstance(seed, int) else 0,
        config,
        read_environment(folder),
        tuple(read_metrics(folder)),
        read_summary(folder),
    )


def number(value: Any) -> float:
    """The value if it is a number that can be drawn, else NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) <= LARGEST else math.nan


def step_of(line: dict[str, Any]) -> int:
    """The step a line is of; 0 where it names none."""
    step = line.get("step")
    return step if isinstance(step, int) else 0
