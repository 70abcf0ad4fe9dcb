"""Run a sweep: choose a learning rate for each optimizer on held-out data, then compare them.

The search trains every arm at the same number of learning rates on nine tenths of the training set
and evaluates on the held-out tenth; a data set with a validation set takes that, and the whole
training set. The final comparison trains the winners on the whole training set and evaluates on the
test set, which the search never sees. An interrupted sweep continues where it stopped. Unusable
settings and folders are a UsageError.
"""

import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neumann.lab.contenders import Contender
from neumann.lab.errors import UsageError
from neumann.lab.metrics import ACCURACY, Metric
from neumann.lab.studies import study_files
from neumann.lab.studies.comparison import (
    Budget,
    Session,
    check_trainable,
    run_comparisons,
)
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
        return Contender.parse(self.arm).name_without_lr

    @property
    def bracketed(self) -> bool:
        """Whether learning rates on both sides of the best were tried."""
        return self.best in self.lrs[1:-1]


def search(
    config: SweepConfig, folder: Path, observer: StudyObserver | None = None
) -> list[ArmSearch]:
    """Train every arm at every learning rate on held-out data, and choose the winners."""
    session = Session(observer or StudyObserver(), Budget(config.seconds))
    (found,) = search_all({folder: config}, folder, session).values()
    return found


def search_all(
    sweeps: Mapping[Path, SweepConfig], root: Path, session: Session
) -> dict[Path, list[ArmSearch]]:
    """Search for all sweeps together, whose folders are in `root`."""
    plans = {folder: SearchPlan.make(config) for folder, config in sweeps.items()}
    new = {folder: plan for folder, plan in plans.items() if not plan.check_folder(folder)}
    # All learning rates of an arm build the same network.
    firsts = {folder: plan.make_trials(first_only=True) for folder, plan in new.items()}
    data = check_trainable({_search_folder(folder): trial for folder, trial in firsts.items()})
    with ExitStack() as stack:
        for folder, plan in plans.items():
            stack.enter_context(lock_folder(folder))
            if not plan.check_folder(folder):  # another process may have started one by now
                write_object(folder / SWEEP, plan.describe(winners=None))
        trials = {_search_folder(folder): plan.make_trials() for folder, plan in plans.items()}
        results = run_comparisons(trials, root, session, data)
        found = {
            folder: plan.choose(result)
            for (folder, plan), result in zip(plans.items(), results, strict=True)
        }
        for folder, plan in plans.items():
            winners = collect_winners(found[folder])
            write_object(folder / SWEEP, plan.describe(winners))
            if not winners:
                arms = ", ".join(plan.config.arms)
                raise AllDivergedError(f"every run of {arms} diverged: try lower learning rates")
    return found


def make_final_config(
    config: SweepConfig, found: list[ArmSearch], factor: float = 1.0
) -> CompareConfig:
    """The comparison of the winners, at the chosen learning rates times `factor`."""
    winners = collect_winners(found)
    arms = tuple(
        str(Contender.parse(arm).with_lr(lr if factor == 1 else _round(lr * factor)))
        for arm, lr in winners.items()
    )
    return config.as_comparison(arms, seeds=config.seeds, held_out=False)


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


def collect_winners(found: list[ArmSearch]) -> dict[str, float]:
    return {each.arm: each.best for each in found if each.best is not None}


def find_winners(config: SweepConfig, folder: Path) -> list[ArmSearch]:
    """Read what a sweep has chosen, or take the lowest learning rates if it has not chosen yet."""
    grid, winners = make_grid(config), None
    if (folder / SWEEP).exists():
        winners = study_files.read_sweep_file(folder)["winners"]
    sources = find_sources(config.arms)
    lowest = {arm: grid[sources.get(arm, arm)][0] for arm in grid}
    return [ArmSearch(arm, grid[arm], (), (winners or lowest).get(arm)) for arm in grid]


def _search_folder(folder: Path) -> Path:
    return study_files.get_part_folder(folder, SEARCH)


@dataclass(frozen=True)
class SearchPlan:
    """The learning rates that a sweep tries, and what its sweep.json says about them."""

    config: SweepConfig
    grid: Grid

    @staticmethod
    def make(config: SweepConfig) -> "SearchPlan":
        config.check()
        plan = SearchPlan(config, make_grid(config))
        final = make_final_config(config, [ArmSearch(arm, (), (), 1.0) for arm in plan.grid])
        final.check()
        for typed, arm in zip(plan.grid, final.arms, strict=True):
            try:
                final.make_run_config(arm, 0, Path(FINAL))
            except UsageError as error:  # it names the arm with an lr that nobody has typed
                raise UsageError(_replace_arm(str(error), arm, typed)) from None
        return plan

    def make_trials(self, first_only: bool = False) -> CompareConfig:
        """The comparison that tries all learning rates, or only the first of each arm."""
        config, texts = self.config, self._list_trials()
        arms = [text for group in texts.values() for text in group[: 1 if first_only else None]]
        return config.as_comparison(
            tuple(arms),
            seeds=config.search_seeds,
            epochs=config.search_epochs or config.epochs,
            held_out=True,
        )

    def _list_trials(self) -> dict[str, list[str]]:
        """The arms of the search, by the arm of the sweep that they try a learning rate for."""
        trials: dict[str, list[str]] = {}
        for arm, lrs in self.grid.items():
            contender = Contender.parse(arm)
            trials[arm] = [str(contender.at_lr(lr)) for lr in lrs]
        return trials

    def choose(self, searched: Comparison) -> list[ArmSearch]:
        """Choose a learning rate for each arm; some take the one of another."""
        rows = {row.text: row for row in searched.rows}
        found: dict[str, ArmSearch] = {}
        for arm, trials in self._list_trials().items():
            if trials:
                chosen = [rows[text] for text in trials]
                found[arm] = _choose(arm, self.grid[arm], chosen, searched.metric)
        for arm, source in find_sources(self.config.arms).items():
            found[arm] = ArmSearch(arm, (), (), found[source].best, None, searched.metric)
        return [found[arm] for arm in self.grid]

    def check_folder(self, folder: Path) -> bool:
        """Return whether the folder holds this sweep. Refuse another study or other settings."""
        study_files.check_no_other_study(folder, SWEEP)
        if not (folder / SWEEP).exists():
            return False
        before, content = study_files.read_sweep_file(folder), self.describe(winners=None)
        keys = ("format", "grid", "search_seeds")  # winners come later, and seeds can be added
        saved, now = ({key: found.get(key) for key in keys} for found in (before, content))
        study_files.check_same_settings(folder, "a sweep", saved, now, {})
        settings = before.get("config"), content["config"]
        study_files.check_same_settings(folder, "a sweep", *settings, SweepConfig().as_dict())
        return True

    def describe(self, winners: dict[str, float] | None) -> dict[str, Any]:
        """Return what sweep.json holds."""
        elsewhere = ("jobs", "seconds", "seeds", "search_seeds")
        record = self.config.as_record()
        return {
            "format": study_files.SWEEP_FORMAT,
            "grid": self.grid,
            "winners": winners,
            "search_seeds": self.config.search_seeds,
            "seeds": self.config.seeds,
            "config": {key: value for key, value in record.items() if key not in elsewhere},
        }


def _replace_arm(message: str, arm: str, typed: str) -> str:
    """Name the arm as it was typed, with and without its label and settings."""
    bare, opt = str(Contender.parse(arm).arm), Contender.parse(typed).opt
    found = re.compile(f"{re.escape(arm)}|{re.escape(bare)}")
    return found.sub(lambda match: typed if match[0] == arm else opt, message)


def _choose(arm: str, lrs: tuple[float, ...], rows: list[ArmResult], metric: Metric) -> ArmSearch:
    scores = tuple(row.score for row in rows)
    warmups = (row.long_warmup for row in rows if row.long_warmup is not None)
    best = choose_lr(lrs, scores, metric)
    return ArmSearch(arm, lrs, scores, best, next(warmups, None), metric)


# ---------------------------------------------------------------------- the learning rates


def make_grid(config: SweepConfig) -> Grid:
    """List the learning rates of each arm: the same number, so that all have the same budget.

    An arm that takes the learning rate of another has none.
    """
    sources = find_sources(config.arms)
    grid = {arm: () if arm in sources else _list_lrs(arm, config.lr) for arm in config.arms}
    names = [Contender.parse(arm).name_without_lr for arm in config.arms]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate:
        raise UsageError(f"--arms names {duplicate} twice")
    searched = {arm: len(lrs) for arm, lrs in grid.items() if lrs}
    if len(set(searched.values())) > 1:
        counts = ", ".join(f"{arm} has {count}" for arm, count in searched.items())
        raise UsageError(f"all arms must try the same number of learning rates: {counts}")
    return grid


def find_sources(arms: tuple[str, ...]) -> dict[str, str]:
    """Find the arms whose lr names another arm, and that arm."""
    wanted = {arm: str(dict(Contender.parse(arm).arm.options).get("lr", "")) for arm in arms}
    searched = {
        Contender.parse(arm).name_without_lr: arm
        for arm, lr in wanted.items()
        if not lr or ":" in lr
    }
    return {arm: searched[lr] for arm, lr in wanted.items() if lr in searched}


def _list_lrs(text: str, shared_range: str | None) -> tuple[float, ...]:
    """Take the arm's own range, else that of --lr, else one around the optimizer's default."""
    arm = Contender.parse(text).arm
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
        raise UsageError(
            f"{what} {text}: the values are too close for {DIGITS} digits; lower COUNT"
        )
    return lrs


def _round(lr: float) -> float:
    return float(f"{lr:.{DIGITS}g}")
