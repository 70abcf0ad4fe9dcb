"""The learning rate of each optimizer, chosen on a held-out part of the training set; then a test.

sweep.json   the learning rates tried of each arm, and those chosen, null while they are searched
search/      a comparison of every arm at every learning rate, on a held-out tenth of the training
             set, which is not trained on; the test set takes no part
final/       a comparison of the winners, trained on the whole training set and tested

Budgets are equal: every arm has the same number of learning rates, seeds and epochs. The winner of
an arm is the learning rate with the best mean accuracy; one at which more trainings diverged is
worse whatever the others reached, and of equals the smallest wins. Interrupted, it goes on where
it was. UsageError for ranges that are none or not equally many values, and for a folder that holds
something else or another sweep, or that another process uses; AllDivergedError where no arm has a
winner.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neumann.lab import plain_json
from neumann.lab.compare import claimed, compare, tried
from neumann.lab.comparison import SWEEP, Comparison, Row, refuse_others, write_object
from neumann.lab.config import KEEPING
from neumann.lab.defaults import completed
from neumann.lab.differences import difference_of
from neumann.lab.errors import UsageError
from neumann.lab.interruption import ComparisonInterrupted
from neumann.lab.optimizers import Arm
from neumann.lab.reading import read_object
from neumann.lab.statistics import Interval
from neumann.lab.studies import CompareConfig, SweepConfig
from neumann.lab.workers import Watch

FORMAT = 1  # of sweep.json
USUAL_COUNT, USUAL_RATIO = 7, 2.0  # of learning rates, about an optimizer's usual one
DIGITS = 3  # significant ones of a learning rate
SEARCH, FINAL = "search", "final"

Grid = dict[str, tuple[float, ...]]  # the learning rates of each arm, rising


class AllDivergedError(RuntimeError):
    """Every training of every arm diverged, so there is nothing to test."""


@dataclass(frozen=True)
class Searched:
    """What the search found of one arm."""

    arm: str
    lrs: tuple[float, ...]  # rising
    scores: tuple[Interval, ...]  # %, on the held-out part, one for each learning rate
    best: float | None  # the learning rate chosen; None if every training diverged
    warmup: int | None = None  # steps of a training, where all of them were Neumann's warm-up

    @property
    def name(self) -> str:
        """The arm without its range of learning rates."""
        return str(_without_lr(Arm.parse(self.arm)))

    @property
    def bracketed(self) -> bool:
        """Whether learning rates on both sides of the best were tried."""
        return self.best in self.lrs[1:-1]


def sweep_grid(config: SweepConfig) -> Grid:
    """The learning rates of each arm; as many for each, or the budgets would not be equal."""
    grid = {text: _values(text, config.lr) for text in config.arms}
    plain = [str(_without_lr(Arm.parse(text))) for text in config.arms]
    twice = next((arm for arm in plain if plain.count(arm) > 1), None)
    if twice:
        raise UsageError(f"--arms names {twice} twice")
    if len({len(values) for values in grid.values()}) > 1:
        counts = ", ".join(f"{text} has {len(values)}" for text, values in grid.items())
        raise UsageError(
            f"all arms must try equally many learning rates, or budgets are not equal: {counts}"
        )
    return grid


def search(config: SweepConfig, folder: Path, watch: Watch | None = None) -> list[Searched]:
    """Train every arm at every learning rate without the held-out part, and choose."""
    config.check()
    grid = sweep_grid(config)
    epochs = config.search_epochs or config.epochs
    names = {arm: [_at(arm, lr) for lr in lrs] for arm, lrs in grid.items()}
    trials = config.compared(
        tuple(name for each in names.values() for name in each),
        seeds=config.search_seeds,
        epochs=epochs,
        held_out=True,
    )
    final_config(config, {arm: lrs[0] for arm, lrs in grid.items()}).check()
    begun = _content(config, grid, None)
    if not _there(folder, begun):
        tried(trials, folder / SEARCH)
    with claimed(folder):
        if not _there(folder, begun):  # also not meanwhile
            write_object(folder / SWEEP, begun)
        comparison = _compared(trials, folder, SEARCH, watch)
        rows = {row.arm: row for row in comparison.rows}
        found = [
            _searched(arm, lrs, [rows[name] for name in names[arm]]) for arm, lrs in grid.items()
        ]
        winners = {each.arm: each.best for each in found if each.best is not None}
        write_object(folder / SWEEP, _content(config, grid, winners))
    if not winners:
        raise AllDivergedError(
            f"every training of {', '.join(grid)} diverged: try smaller learning rates with --lr"
        )
    return found


def final(
    config: SweepConfig, folder: Path, found: list[Searched], watch: Watch | None = None
) -> Comparison:
    """Train the winners on the whole training set, and compare them on the test set."""
    winners = {each.arm: each.best for each in found if each.best is not None}
    with claimed(folder):
        return _compared(final_config(config, winners), folder, FINAL, watch)


def final_config(config: SweepConfig, winners: dict[str, float]) -> CompareConfig:
    """The comparison of arms at the learning rates that were chosen for them."""
    return config.compared(
        tuple(_at(arm, lr) for arm, lr in winners.items()), seeds=config.seeds, held_out=False
    )


def best(lrs: tuple[float, ...], scores: tuple[Interval, ...]) -> float | None:
    """The learning rate with the fewest divergences, then the best mean, then the smallest."""
    # Means that differ by rounding alone are equal.
    ranked = [
        (score.diverged, -round(score.mean, 6), lr)
        for lr, score in zip(lrs, scores, strict=True)
        if score.mean is not None
    ]
    return min(ranked)[-1] if ranked else None


def _searched(arm: str, lrs: tuple[float, ...], rows: list[Row]) -> Searched:
    scores = tuple(row.accuracy for row in rows)
    warmup = next((row.warmup for row in rows if row.warmup is not None), None)
    return Searched(arm, lrs, scores, best(lrs, scores), warmup)


def _compared(config: CompareConfig, folder: Path, part: str, watch: Watch | None) -> Comparison:
    try:
        return compare(config, folder / part, watch)
    except ComparisonInterrupted as stopped:  # name the folder of the sweep
        raise ComparisonInterrupted(stopped.number, stopped.ended, stopped.total, folder) from None


def _there(folder: Path, content: dict[str, Any]) -> bool:
    """Whether this sweep was begun here; another one is refused."""
    refuse_others(folder, SWEEP)
    if not (folder / SWEEP).exists():
        return False
    before, now = read_object(folder / SWEEP), plain_json.encode(content)
    for each in (before, now):  # trainings may be added to the final comparison
        each.pop("winners", None), each.pop("seeds", None)
    if isinstance(before.get("config"), dict):
        before["config"] = completed(before["config"], now["config"], _usual())
    difference = difference_of(plain_json.encode(before), now)
    if difference:
        raise UsageError(
            f"{folder} holds another sweep: {difference}; choose another folder, or remove this one"
        )
    return True


def _content(config: SweepConfig, grid: Grid, winners: dict[str, float] | None) -> dict[str, Any]:
    kept = (*KEEPING, "jobs", "seeds", "search_seeds")
    return {
        "format": FORMAT,
        "grid": grid,
        "winners": winners,
        "search_seeds": config.search_seeds,
        "seeds": config.seeds,
        "config": {key: value for key, value in config.as_dict().items() if key not in kept},
    }


def _usual() -> dict[str, Any]:
    """The settings of a sweep for which nothing was said, as they are written."""
    usual: dict[str, Any] = plain_json.encode(SweepConfig().as_dict())
    return usual


def _values(text: str, common: str | None) -> tuple[float, ...]:
    """The learning rates of an arm: of its own range, else the command's, else about its usual."""
    arm = Arm.parse(text)
    own = dict(arm.options).get("lr")
    if own is not None:
        return _range(str(own), f"{text}: lr")
    if common is not None:
        return _range(common, "--lr")
    usual, middle = arm.lr(), USUAL_COUNT // 2
    return tuple(_rounded(usual * USUAL_RATIO ** (k - middle)) for k in range(USUAL_COUNT))


def _range(text: str, what: str) -> tuple[float, ...]:
    """LOW:HIGH:COUNT as numbers in equal ratios; the ends are as given."""
    wrong = UsageError(
        f"{what} must be LOW:HIGH:COUNT, as in 0.05:3.2:7, with 0 < LOW < HIGH; got {text!r}"
    )
    try:
        low_text, high_text, count_text = text.split(":")
        low, high, count = float(low_text), float(high_text), int(count_text)
    except ValueError:
        raise wrong from None
    if not (0 < low < high < math.inf and count >= 2):
        raise wrong
    ratio = (high / low) ** (1 / (count - 1))
    values = (low, *(_rounded(low * ratio**k) for k in range(1, count - 1)), high)
    if list(values) != sorted(set(values)):
        raise UsageError(f"{what} {text}: {count} values lie too close, {DIGITS} digits apart")
    return values


def _rounded(lr: float) -> float:
    return float(f"{lr:.{DIGITS}g}")


def _at(text: str, lr: float) -> str:
    return str(Arm.parse(text).with_options(lr=lr))


def _without_lr(arm: Arm) -> Arm:
    return Arm(arm.name, tuple(pair for pair in arm.options if pair[0] != "lr"))
