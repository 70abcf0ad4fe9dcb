"""The tests that a claim can have, on the runs of studies/paper.

Each test names the runs that it needs and turns them into one effect for each seed, positive in the
direction of the claim. The two runs of a pair share their seed. A run that diverged has no score:
its seed is left out of the interval and counted.
"""

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from benchmarks.common.ledger import Run
from benchmarks.paper.judging import Evidence, weigh_direction, weigh_equivalence, weigh_spread
from benchmarks.paper.run_lines import Results

STUDIES = Path(__file__).parents[2] / "studies/paper"
MARGIN = 0.2  # points; within it two things are equal, and a claim without a size says at least it
EARLY = 1 / 3  # of a run


@dataclass(frozen=True)
class Source:
    """An arm of a study, at a point of its axes."""

    study: str
    arm: str
    point: str = ""

    @property
    def needed(self) -> int:
        return count_seeds(self.study)

    def __str__(self) -> str:
        return f"{self.arm} ({self.point})" if self.point else self.arm


@dataclass(frozen=True)
class Outcome:
    """What a test has found."""

    label: str  # what is compared
    figure: str  # the effect with its interval, in words
    evidence: Evidence
    diverged: int = 0  # runs of the arm that the claim speaks for
    without: int = 0  # runs of that arm beside which the other arm's run diverged


@dataclass(frozen=True)
class Missing:
    """Why a test cannot be done yet."""

    study: str
    seeds: int  # that have run
    needed: int


class ClaimTest(Protocol):
    @property
    def sources(self) -> Sequence[Source]:
        """The runs that it needs."""

    def run(self, results: Results) -> Outcome | Missing: ...


@cache
def count_seeds(study: str) -> int:
    """The seeds that the file of a study asks for."""
    return int(read_study(study)["test"]["seeds"])


def read_study(study: str) -> dict[str, Any]:
    """What the file of a study says."""
    return tomllib.loads((STUDIES / f"{study}.toml").read_text())


# ---------------------------------------------------------------------- a number of one run


def get_score(run: Run) -> float:
    """Accuracy in %, or for text the loss in nats."""
    return math.nan if run.get("diverged") else float(run["score"])


def get_loss(run: Run) -> float:
    return -get_score(run)


def get_log_train_loss(run: Run) -> float:
    return math.nan if run.get("diverged") else math.log(run["train_loss"])


def get_curve(run: Run) -> list[float | None]:
    """The score by epoch, where it can be with BatchNorm statistics of the evaluated weights.

    Those that training leaves belong to Neumann's displaced weights, which no claim is about.
    """
    curve: list[float | None] = run.get("recalibrated_curve") or run["curve"]
    return curve


def measure_early_drops(run: Run) -> float:
    """The mean fall of the accuracy from one epoch to the next in the first third, in points."""
    if run.get("diverged"):
        return math.nan
    curve = [math.nan if value is None else value for value in get_curve(run)]
    early = curve[: max(2, round(EARLY * len(curve)))]
    if len(early) < 2:
        return math.nan
    return math.fsum(max(0.0, a - b) for a, b in pairwise(early)) / (len(early) - 1)


UNITS: dict[Callable[[Run], float], str] = {
    get_score: "points",
    get_loss: "nats",
    get_log_train_loss: "log",
    measure_early_drops: "points an epoch",
}


# ---------------------------------------------------------------------- tests


@dataclass(frozen=True)
class Contrast:
    """Is one arm ahead of another by more than `null`; by less than `claimed`?

    With `claimed_share` the claimed effect is at most that share of the other arm's error: 0.8
    points of an error of 22 % are much less of one of 5 %.
    """

    better: Source
    worse: Source
    quantity: Callable[[Run], float] = get_score
    null: float = 0.0
    claimed: float = MARGIN
    claimed_share: float | None = None

    @property
    def sources(self) -> Sequence[Source]:
        return self.better, self.worse

    def run(self, results: Results) -> Outcome | Missing:
        missing = find_missing(self.sources, results)
        if missing is not None:
            return missing
        ours, theirs = (results.find(s.study, s.arm, s.point) for s in self.sources)
        effects, diverged, without = subtract(ours, theirs, self.quantity)
        claimed = self.claimed
        if self.claimed_share is not None:
            scores = [score for run in theirs.values() if math.isfinite(score := get_score(run))]
            if scores:
                error = 100 - fmean(scores)
                claimed = min(claimed, self.claimed_share * error)
        evidence = weigh_direction(effects, self.null, claimed)
        label = f"{self.better.study}: {self.better} − {self.worse}"
        figure = format_effect(evidence, UNITS[self.quantity])
        return Outcome(label, figure, evidence, diverged, without)


def lose_at_most(
    margin: float, arm: Source, other: Source, quantity: Callable[[Run], float] = get_score
) -> Contrast:
    """Does an arm lose no more than the margin to another?"""
    return Contrast(arm, other, quantity, null=-margin, claimed=-margin)


@dataclass(frozen=True)
class Equivalence:
    """Are two arms, or two kinds of arms on average, within ± `margin` points of each other?"""

    a: tuple[Source, ...]
    b: tuple[Source, ...]  # each beside one of a
    margin: float = MARGIN

    @property
    def sources(self) -> Sequence[Source]:
        return (*self.a, *self.b)

    def run(self, results: Results) -> Outcome | Missing:
        missing = find_missing(self.sources, results)
        if missing is not None:
            return missing
        by_seed = []
        for seed in range(min(source.needed for source in self.sources)):
            a, b = (
                [get_score(results.find(s.study, s.arm, s.point)[seed]) for s in side]
                for side in (self.a, self.b)
            )
            by_seed.append(fmean(x - y for x, y in zip(a, b, strict=True)))
        effects = [effect for effect in by_seed if math.isfinite(effect)]
        evidence = weigh_equivalence(effects, self.margin)
        names = (", ".join(str(source) for source in side) for side in (self.a, self.b))
        label = f"{self.a[0].study}: {' − '.join(names)}"
        if len(self.a) > 1:
            label += " (means)"
        diverged = len(by_seed) - len(effects)
        return Outcome(label, format_effect(evidence, "points"), evidence, diverged)


@dataclass(frozen=True)
class Spread:
    """Is the spread over seeds so small that two single runs show a difference?

    Two runs differ by chance by less than 1.96·√2 standard deviations in 95 % of cases.
    """

    source: Source
    difference: float  # points, that single runs should show

    @property
    def sources(self) -> Sequence[Source]:
        return (self.source,)

    def run(self, results: Results) -> Outcome | Missing:
        missing = find_missing(self.sources, results)
        if missing is not None:
            return missing
        runs = results.find(self.source.study, self.source.arm, self.source.point)
        scores = [score for run in runs.values() if math.isfinite(score := get_score(run))]
        limit = self.difference / (1.96 * math.sqrt(2))
        evidence = weigh_spread(scores, limit)
        label, diverged = f"{self.source.study}: spread of {self.source}", len(runs) - len(scores)
        if len(scores) < 2:
            return Outcome(label, "too few runs ended", evidence, diverged)
        deviation, high, low = (
            limit / math.exp(v) for v in (evidence.mean, evidence.low, evidence.high)
        )
        figure = (
            f"deviation {deviation:.2f} [{low:.2f}, {high:.2f}] points, limit {limit:.2f}, "
            f"n = {evidence.n}"
        )
        return Outcome(label, figure, evidence, diverged)


# ---------------------------------------------------------------------- what tests share


def find_missing(sources: Sequence[Source], results: Results) -> Missing | None:
    """The study that lacks the most seeds."""
    found = [(results.find(s.study, s.arm, s.point), s) for s in sources]
    needed = min(source.needed for source in sources)
    lacking = [
        Missing(source.study, ended, needed)
        for runs, source in found
        if (ended := sum(seed in runs for seed in range(needed))) < needed
    ]
    return min(lacking, key=lambda each: each.seeds, default=None)


def subtract(
    a: Mapping[int, Run], b: Mapping[int, Run], quantity: Callable[[Run], float]
) -> tuple[list[float], int, int]:
    """The differences over common seeds where both runs ended well; how often a diverged, or b."""
    pairs = [(quantity(a[seed]), quantity(b[seed])) for seed in sorted(a.keys() & b.keys())]
    finite = [x - y for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
    ended = [(math.isfinite(x), math.isfinite(y)) for x, y in pairs]
    return finite, sum(not x for x, _ in ended), sum(x and not y for x, y in ended)


def fit_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the line with the least squares."""
    center = math.fsum(x) / len(x)
    spread = math.fsum((each - center) ** 2 for each in x)
    return math.fsum((a - center) * b for a, b in zip(x, y, strict=True)) / spread


def format_effect(evidence: Evidence, unit: str) -> str:
    """As in "+0.31 [+0.12, +0.50] points, n = 10"."""
    if math.isnan(evidence.mean):
        return "nothing to compare: all runs of one side diverged"
    digits = 2 if unit.startswith("points") else 3
    values = (evidence.mean, evidence.low, evidence.high)
    mean, low, high = (  # adding zero turns −0 into 0
        f"{round(value, digits) + 0.0:+.{digits}f}".replace("-", "−") for value in values
    )
    level = "" if evidence.level == 0.95 else f" ({100 * evidence.level:.0f} % interval)"
    return f"{mean} [{low}, {high}] {unit}{level}, n = {evidence.n}"
