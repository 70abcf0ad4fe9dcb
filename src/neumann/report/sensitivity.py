"""Accuracy against the learning rate, an arm a curve: what a sweep looks for.

Arms are grouped by everything but lr. Divergence is a result at the learning rate where it
happened. A best lr at the end of its grid is not bracketed: a better one may lie beyond, and the
note says so.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from neumann.lab.comparison import Comparison
from neumann.lab.errors import UsageError
from neumann.lab.optimizers import Arm


@dataclass(frozen=True)
class Trial:
    """One learning rate of an arm."""

    lr: float
    accuracies: tuple[float, ...]  # %, of the seeds that ended with one
    diverged: int  # seeds
    missing: int  # seeds that have not ended

    @property
    def mean(self) -> float | None:
        return math.fsum(self.accuracies) / len(self.accuracies) if self.accuracies else None


@dataclass(frozen=True)
class Sensitivity:
    """An arm over its learning rates."""

    arm: str  # without lr
    place: int
    trials: tuple[Trial, ...]  # by lr, ascending
    chosen: float | None = None  # the lr that a sweep chose

    @property
    def best(self) -> Trial | None:
        """The chosen one, else the one with the highest mean of those without divergence."""
        if self.chosen is not None:
            chosen = self.chosen
            return next((t for t in self.trials if math.isclose(t.lr, chosen)), None)
        sound = [trial for trial in self.trials if trial.mean is not None and not trial.diverged]
        return max(sound, key=lambda trial: trial.mean or 0.0, default=None)

    def note(self) -> str | None:
        """A sentence where the best lr is at an end of what was tried."""
        best, rates = self.best, [trial.lr for trial in self.trials]
        if best is None:
            ended = any(trial.diverged for trial in self.trials)
            waiting = any(trial.missing for trial in self.trials)
            if ended and not waiting:
                return f"{self.arm} diverged at every learning rate tried."
            return None
        if len(rates) < 2 or best.lr not in (rates[0], rates[-1]):
            return None
        end, side = ("lowest", "lower") if best.lr == rates[0] else ("highest", "higher")
        return (
            f"The best learning rate of {self.arm}, {best.lr:g}, is the {end} tried: it is not "
            f"bracketed, and a {side} one may be better."
        )


def of_comparison(
    comparison: Comparison,
    default_lr: float | None,
    chosen: Mapping[str, float] | None = None,
    least: int = 2,
) -> tuple[Sensitivity, ...]:
    """Its arms by everything but lr; only those of which enough learning rates were run.

    Args:
        comparison: as read.
        default_lr: of arms that name none themselves; None is each recipe's.
        chosen: the learning rate that was chosen, by the arm's name without lr.
        least: how many different learning rates are enough.
    """
    found: dict[str, list[Trial]] = {}
    places: dict[str, int] = {}
    for index, row in enumerate(comparison.rows):
        known = split_lr(row.arm, default_lr)
        if known is None:
            continue
        name, lr = known
        accuracies = [run.accuracy for run in row.runs.values()]
        finite = tuple(value for value in accuracies if math.isfinite(value))
        diverged = len(accuracies) - len(finite)
        trial = Trial(lr, finite, diverged, comparison.seeds - len(accuracies))
        found.setdefault(name, []).append(trial)
        places.setdefault(name, index)
    several = {
        name: trials for name, trials in found.items() if len({t.lr for t in trials}) >= least
    }
    return tuple(
        Sensitivity(name, places[name], _ascending(trials), (chosen or {}).get(name))
        for name, trials in several.items()
    )


def split_lr(text: str, default_lr: float | None = None) -> tuple[str, float] | None:
    """An arm's name without its lr, and the lr; None for what is no arm."""
    try:
        return without_lr(text), Arm.parse(text).lr(default_lr)
    except (UsageError, TypeError, ValueError):
        return None


def without_lr(text: str) -> str:
    """An arm's name without its lr, which in a sweep may be a range; what is no arm as it is."""
    try:
        arm = Arm.parse(text)
    except UsageError:
        return text
    return str(Arm(arm.name, tuple(pair for pair in arm.options if pair[0] != "lr")))


def _ascending(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    return tuple(sorted(trials, key=lambda trial: trial.lr))
