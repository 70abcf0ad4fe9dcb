"""Run a sweep: choose a learning rate for each optimizer on held-out data, then compare them.

The search trains every arm at equally many learning rates on nine tenths of the training set and
evaluates on the held-out tenth; a data set with a validation set takes that, and the whole training
set. The final comparison trains the winners on the whole training set and evaluates on the test
set, which the search never sees. An interrupted sweep continues where it stopped. Unusable settings
and folders are a UsageError.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neumann.lab.arms import Arm
from neumann.lab.errors import UsageError
from neumann.lab.metrics import ACCURACY, Metric
from neumann.lab.studies import study_files
from neumann.lab.studies.comparison import StudyInterrupted, check_trainable, run_comparison
from neumann.lab.studies.results import ArmResult, Comparison
from neumann.lab.studies.settings import CompareConfig, SweepConfig
from neumann.lab.studies.statistics import Interval
from neumann.lab.studies.study_files import FINAL, SEARCH, SWEEP, lock_folder, write_object
from neumann.lab.studies.wording import LongWarmup
from neumann.lab.studies.workers import StudyObserver

DEFAULT_COUNT, DEFAULT_RATIO = 7, 2.0  # learning rates around an optimizer's default
DIGITS = 3  # significant digits of a learning rate

Grid = dict[str, tuple[float, ...]]  # the learning rates of each arm, ascending


class AllDivergedError(RuntimeError):
    """No arm has a winner, so there is nothing to compare."""


@dataclass(frozen=True)
class ArmSearch:
    arm: str
    lrs: tuple[float, ...]  # ascending
    scores: tuple[Interval, ...]  # on held-out data, one for each learning rate
    best: float | None  # the chosen learning rate; None if every run diverged
    long_warmup: LongWarmup | None = None  # if most of a Neumann run was its warm-up
    metric: Metric = ACCURACY

    @property
    def name(self) -> str:
        """The arm without its range of learning rates."""
        return str(Arm.parse(self.arm).without_lr())

    @property
    def bracketed(self) -> bool:
        """Whether learning rates on both sides of the best were tried."""
        return self.best in self.lrs[1:-1]


def search(
    config: SweepConfig, folder: Path, observer: StudyObserver | None = None
) -> list[ArmSearch]:
    """Train every arm at every learning rate on held-out data, and choose the winners."""
    config.check()
    grid = make_grid(config)
    names = {arm: [_set_lr(arm, lr) for lr in lrs] for arm, lrs in grid.items()}
    trials = config.as_comparison(
        tuple(name for arm_names in names.values() for name in arm_names),
        seeds=config.search_seeds,
        epochs=config.search_epochs or config.epochs,
        held_out=True,
    )
    _make_final_config(config, {arm: lrs[0] for arm, lrs in grid.items()}).check()
    content = _describe_sweep(config, grid, winners=None)
    _check_sweep_folder(folder, content)
    if not (folder / SWEEP).exists():
        check_trainable(trials, study_files.get_part_folder(folder, SEARCH))
    with lock_folder(folder):
        _check_sweep_folder(folder, content)  # another process may have started one by now
        if not (folder / SWEEP).exists():
            write_object(folder / SWEEP, content)
        metric = trials.metric
        rows = {row.arm: row for row in _run_part(trials, folder, SEARCH, observer).rows}
        found = [
            _choose(arm, grid[arm], [rows[name] for name in names[arm]], metric) for arm in grid
        ]
        winners = _collect_winners(found)
        write_object(folder / SWEEP, _describe_sweep(config, grid, winners))
    if not winners:
        raise AllDivergedError(f"every run of {', '.join(grid)} diverged: try smaller --lr")
    return found


def compare_winners(
    config: SweepConfig, folder: Path, found: list[ArmSearch], observer: StudyObserver | None = None
) -> Comparison:
    """Train the winners on the whole training set, and compare them on the test set."""
    with lock_folder(folder):
        final = _make_final_config(config, _collect_winners(found))
        return _run_part(final, folder, FINAL, observer)


def choose_lr(
    lrs: tuple[float, ...], scores: tuple[Interval, ...], metric: Metric = ACCURACY
) -> float | None:
    """Choose by the fewest divergences, then the best mean, then the smallest learning rate."""
    # Rounding makes means equal that differ only by rounding errors.
    ranked = [
        (score.diverged, -round(metric.gain(score.mean), 6), lr)
        for lr, score in zip(lrs, scores, strict=True)
        if score.mean is not None
    ]
    return min(ranked)[-1] if ranked else None


def _choose(arm: str, lrs: tuple[float, ...], rows: list[ArmResult], metric: Metric) -> ArmSearch:
    scores = tuple(row.score for row in rows)
    warmups = (row.long_warmup for row in rows if row.long_warmup is not None)
    best = choose_lr(lrs, scores, metric)
    return ArmSearch(arm, lrs, scores, best, next(warmups, None), metric)


def _collect_winners(found: list[ArmSearch]) -> dict[str, float]:
    return {each.arm: each.best for each in found if each.best is not None}


def _make_final_config(config: SweepConfig, winners: dict[str, float]) -> CompareConfig:
    arms = tuple(_set_lr(arm, lr) for arm, lr in winners.items())
    return config.as_comparison(arms, seeds=config.seeds, held_out=False)


def _run_part(
    config: CompareConfig, folder: Path, part: str, observer: StudyObserver | None
) -> Comparison:
    try:
        return run_comparison(config, study_files.get_part_folder(folder, part), observer)
    except StudyInterrupted as stop:  # name the sweep's folder instead of the part's
        raise StudyInterrupted(stop.number, stop.ended, stop.total, folder) from None


# ---------------------------------------------------------------------- sweep.json


def _check_sweep_folder(folder: Path, content: dict[str, Any]) -> None:
    """Refuse a folder that holds another study, or a sweep with other settings."""
    study_files.check_no_other_study(folder, SWEEP)
    if not (folder / SWEEP).exists():
        return
    before = study_files.read_sweep_file(folder)
    keys = ("format", "grid", "search_seeds")  # winners come later, and seeds can be added
    saved, now = ({key: found.get(key) for key in keys} for found in (before, content))
    study_files.check_same_settings(folder, "a sweep", saved, now, {})
    settings = before.get("config"), content["config"]
    study_files.check_same_settings(folder, "a sweep", *settings, SweepConfig().as_dict())


def _describe_sweep(
    config: SweepConfig, grid: Grid, winners: dict[str, float] | None
) -> dict[str, Any]:
    elsewhere = ("jobs", "seeds", "search_seeds")
    return {
        "format": study_files.SWEEP_FORMAT,
        "grid": grid,
        "winners": winners,
        "search_seeds": config.search_seeds,
        "seeds": config.seeds,
        "config": {k: v for k, v in config.as_record().items() if k not in elsewhere},
    }


# ---------------------------------------------------------------------- the learning rates


def make_grid(config: SweepConfig) -> Grid:
    """List the learning rates of each arm: equally many, so that all arms have the same budget."""
    grid = {arm: _list_lrs(arm, config.lr) for arm in config.arms}
    names = [str(Arm.parse(arm).without_lr()) for arm in config.arms]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate:
        raise UsageError(f"--arms names {duplicate} twice")
    if len({len(lrs) for lrs in grid.values()}) > 1:
        counts = ", ".join(f"{arm} has {len(lrs)}" for arm, lrs in grid.items())
        raise UsageError(f"all arms must try equally many learning rates: {counts}")
    return grid


def _list_lrs(text: str, shared_range: str | None) -> tuple[float, ...]:
    """Take the arm's own range, else that of --lr, else one around the optimizer's default."""
    arm = Arm.parse(text)
    own_range = dict(arm.options).get("lr")
    if own_range is not None:
        return _parse_range(str(own_range), f"{text}: lr")
    if shared_range is not None:
        return _parse_range(shared_range, "--lr")
    exponents = range(-(DEFAULT_COUNT // 2), DEFAULT_COUNT // 2 + 1)
    return tuple(_round(arm.lr() * DEFAULT_RATIO**exponent) for exponent in exponents)


def _parse_range(text: str, what: str) -> tuple[float, ...]:
    """Turn LOW:HIGH:COUNT into a geometric sequence from exactly LOW to exactly HIGH."""
    invalid = UsageError(
        f"{what} must be LOW:HIGH:COUNT, such as 0.05:3.2:7, with 0 < LOW < HIGH; got {text!r}"
    )
    try:
        low_text, high_text, count_text = text.split(":")
        low, high, count = float(low_text), float(high_text), int(count_text)
    except ValueError:
        raise invalid from None
    if not (0 < low < high < math.inf and count >= 2):
        raise invalid
    ratio = (high / low) ** (1 / (count - 1))
    lrs = (low, *(_round(low * ratio**k) for k in range(1, count - 1)), high)
    if list(lrs) != sorted(set(lrs)):
        raise UsageError(f"{what} {text}: the values are too close together for {DIGITS} digits")
    return lrs


def _round(lr: float) -> float:
    return float(f"{lr:.{DIGITS}g}")


def _set_lr(text: str, lr: float) -> str:
    return str(Arm.parse(text).with_options(lr=lr))
