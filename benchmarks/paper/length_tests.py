"""Tests on runs of several lengths or batch sizes: epochs to an accuracy, steps saved, advantage.

Every length is a whole run with its whole schedule. Between two lengths an accuracy is interpolated
over the logarithm of the epochs. A seed with a run that diverged is left out and counted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from statistics import fmean

from benchmarks.paper.claim_tests import (
    MARGIN,
    Missing,
    Outcome,
    Source,
    find_missing,
    fit_slope,
    format_effect,
    get_score,
)
from benchmarks.paper.judging import Evidence, weigh_direction
from benchmarks.paper.run_lines import Results, name_point
from neumann.lab.studies.statistics import mean_interval

# The studies scaling and scaling-epochs.
BATCHES = (512, 2048, 8192, 32768)
SHORTER, LONGEST = (15, 30), 60  # epochs
TARGET_EPOCHS = 30  # of Nesterov at the smallest batch, whose accuracy is to be reached
STEPS_OF_A_SHARE = 1000  # in which the lengths are searched for the one that equals a baseline

Scores = Mapping[int, Mapping[int, float]]  # by length or batch size, then by seed


@dataclass(frozen=True)
class AdvantageByBatch:
    """Does the difference of two arms grow with the batch, from the smallest to the largest?

    The effect of a seed is the slope of a line through its differences against log2(batch), times
    the doublings between the smallest and the largest batch.
    """

    better: Mapping[int, Source]  # by batch size
    worse: Mapping[int, Source]
    claimed: float = MARGIN

    @property
    def sources(self) -> Sequence[Source]:
        return (*self.better.values(), *self.worse.values())

    def run(self, results: Results) -> Outcome | Missing:
        missing = find_missing(self.sources, results)
        if missing is not None:
            return missing
        ours, theirs = (collect_scores(side, results) for side in (self.better, self.worse))
        doublings = [math.log2(batch) for batch in self.better]
        width = max(doublings) - min(doublings)
        effects = [
            width * fit_slope(doublings, [ours[b][seed] - theirs[b][seed] for b in self.better])
            for seed in list_ended(ours, theirs)
        ]
        evidence = weigh_direction(effects, 0.0, self.claimed)
        ends = min(self.better), max(self.better)
        label = f"advantage at {ends[1]:,} − advantage at {ends[0]:,}, by a line"
        figure = format_effect(evidence, "points")
        return Outcome(label, figure, evidence, *count_lost(ours, theirs))


@dataclass(frozen=True)
class EpochsToAccuracy:
    """Does a batch size need at most `factor` times the epochs of a small one?

    The accuracy to reach is the mean of `reference`. Epochs come from the mean accuracy at each
    length, and their interval from the jackknife over seeds. A batch that does not get there counts
    as its longest run, which flatters it, so the test can then only speak against the claim.
    Without the epochs of the small batch there is nothing to compare with.
    """

    small: Mapping[int, Source]  # by epochs
    large: Mapping[int, Source]
    reference: Source
    factor: float

    @property
    def sources(self) -> Sequence[Source]:
        return (*self.small.values(), *self.large.values(), self.reference)

    def run(self, results: Results) -> Outcome | Missing:
        missing = find_missing(self.sources, results)
        if missing is not None:
            return missing
        label, null = self._name(), -math.log(self.factor)
        target = find_target(self.reference, results)
        if target is None:
            figure = f"{self.reference} has no accuracy: all its runs diverged"
            return Outcome(label, figure, weigh_direction([], 0.0, 0.0))
        small, large = (collect_scores(side, results) for side in (self.small, self.large))
        samples: list[tuple[EpochsNeeded, EpochsNeeded]] = []

        def compare(seeds: Sequence[int]) -> float:
            needed = [find_epochs(average(scores, seeds), target) for scores in (small, large)]
            samples.append((needed[0], needed[1]))
            return math.log(needed[0].epochs / needed[1].epochs)

        effects = jackknife(compare, list_ended(small, large))
        evidence = weigh_direction(effects, null, null)
        known = all(few.interpolated for few, _ in samples)
        reached = all(many.reached for _, many in samples)
        if not (known and reached):
            evidence = replace(evidence, p_for=1.0)
        if not known or any(many.reached and not many.interpolated for _, many in samples):
            evidence = replace(evidence, p_against=1.0)
        ratio, high, low = (math.exp(-v) for v in (evidence.mean, evidence.low, evidence.high))
        figure = (
            f"{'' if reached else 'at least '}{ratio:.2f} [{low:.2f}, {high:.2f}] × the epochs to "
            f"{target:.1f} %, n = {evidence.n}"
        )
        return Outcome(label, figure, evidence, *count_lost(large, small))

    def _name(self) -> str:
        first = next(iter(self.large.values())), next(iter(self.small.values()))
        points = " beside ".join(source.point.partition(",")[0] for source in first)
        return f"{first[0].study}: {first[0].arm}, {points}"


@dataclass(frozen=True)
class StepsSaved:
    """How many steps does an arm save on the way to the accuracy of another arm's whole run?

    The interval holds all lengths at which the two do not differ: where the interval of their
    paired difference contains zero. So the arm saves steps if it is ahead at equal length, and
    saves less than `claimed` if it is behind when its runs are that much shorter.
    """

    lengths: Mapping[int, Source]  # by epochs, the last as long as the other arm's run
    other: Source
    claimed: float  # the share of the steps

    @property
    def sources(self) -> Sequence[Source]:
        return (*self.lengths.values(), self.other)

    def run(self, results: Results) -> Outcome | Missing:
        missing = find_missing(self.sources, results)
        if missing is not None:
            return missing
        whole = max(self.lengths)
        most = 1 - min(self.lengths) / whole
        scores = collect_scores(self.lengths, results)
        other = collect_scores({whole: self.other}, results)
        seeds, lost = list_ended(scores, other), count_lost(scores, other)
        label = f"{self.other.study}: {self.lengths[whole]} beside {self.other}"

        def find_leads(saved: float) -> list[float]:
            epochs = (1 - saved) * whole
            return [
                interpolate({n: by_seed[seed] for n, by_seed in scores.items()}, epochs)
                - other[whole][seed]
                for seed in seeds
            ]

        at_equal_length = weigh_direction(find_leads(0.0), 0.0, 0.0)
        shorter = weigh_direction(find_leads(self.claimed), 0.0, 0.0)
        if len(seeds) < 2:
            return Outcome(label, "too few runs ended", at_equal_length, *lost)
        shares = [most * k / STEPS_OF_A_SHARE for k in range(STEPS_OF_A_SHARE + 1)]
        leads = [mean_interval(find_leads(share)) for share in shares]
        evidence = Evidence(
            find_last_lead(shares, [each.mean for each in leads]),
            find_last_lead(shares, [each.low for each in leads]),
            find_last_lead(shares, [each.high for each in leads]),
            len(seeds),
            at_equal_length.p_for,
            shorter.p_against,
        )
        return Outcome(label, format_saving(evidence, most), evidence, *lost)


def find_last_lead(shares: Sequence[float], leads: Sequence[float | None]) -> float:
    """The largest share up to which there is a lead; −∞ without any, ∞ if there is always one."""
    count = sum(1 for _ in takewhile(lambda lead: (lead or 0.0) > 0, leads))
    if count == len(shares):
        return math.inf
    return shares[count - 1] if count else -math.inf


def format_saving(evidence: Evidence, most: float) -> str:
    """As in "8.1 % [none, over 30.0 %] of the steps saved, n = 10"."""

    def name(share: float) -> str:
        if share < 0:
            return "none"
        return f"over {100 * most:.1f} %" if share > most else f"{100 * share:.1f} %"

    mean, low, high = (name(share) for share in (evidence.mean, evidence.low, evidence.high))
    return f"{mean} [{low}, {high}] of the steps saved, n = {evidence.n}"


@dataclass(frozen=True)
class EpochsNeeded:
    epochs: float
    reached: bool = True  # False: not with the longest run
    interpolated: bool = True  # False: it is only known to be this or less, or to be more


def find_epochs(scores: Mapping[int, float], target: float) -> EpochsNeeded:
    """The epochs to an accuracy; if the shortest run is already there, its length."""
    before: int | None = None
    for length in sorted(scores):
        if scores[length] >= target:
            if before is None:
                return EpochsNeeded(float(length), interpolated=scores[length] == target)
            share = (target - scores[before]) / (scores[length] - scores[before])
            return EpochsNeeded(before * (length / before) ** share)
        before = length
    return EpochsNeeded(float(max(scores)), reached=False, interpolated=False)


def interpolate(scores: Mapping[int, float], epochs: float) -> float:
    """The accuracy after so many epochs, which lie between the lengths of the runs."""
    lengths = sorted(scores)
    above = next(n for n in lengths[1:] if epochs <= n or n == lengths[-1])
    below = lengths[lengths.index(above) - 1]
    share = math.log(epochs / below) / math.log(above / below)
    return scores[below] + share * (scores[above] - scores[below])


def list_lengths(arm: str, batch: int) -> dict[int, Source]:
    """The runs of an arm by their epochs; the longest are those of the scaling study."""
    shorter = {
        epochs: Source("scaling-epochs", arm, name_point(batch_size=batch, epochs=epochs))
        for epochs in SHORTER
    }
    return shorter | {LONGEST: Source("scaling", arm, name_point(batch_size=batch))}


def find_target(reference: Source, results: Results) -> float | None:
    """The accuracy to reach: the mean of the runs that did not diverge."""
    found = results.find(reference.study, reference.arm, reference.point).values()
    scores = [score for run in found if math.isfinite(score := get_score(run))]
    return fmean(scores) if scores else None


def collect_scores(side: Mapping[int, Source], results: Results) -> Scores:
    """NaN for a run that diverged."""
    return {
        place: {
            seed: get_score(run)
            for seed, run in results.find(source.study, source.arm, source.point).items()
        }
        for place, source in side.items()
    }


def list_ended(*sides: Scores) -> list[int]:
    """The seeds of which all runs of all sides are there and none diverged."""
    columns = [by_seed for scores in sides for by_seed in scores.values()]
    common = set.intersection(*(set(by_seed) for by_seed in columns)) if columns else set()
    return sorted(s for s in common if all(math.isfinite(by_seed[s]) for by_seed in columns))


def count_lost(ours: Scores, theirs: Scores) -> tuple[int, int]:
    """The runs of ours that diverged; the seeds of theirs that diverged where ours ended."""
    diverged = sum(
        not math.isfinite(score) for by_seed in ours.values() for score in by_seed.values()
    )
    return diverged, len(list_ended(ours)) - len(list_ended(ours, theirs))


def average(scores: Scores, seeds: Sequence[int]) -> dict[int, float]:
    return {place: fmean(by_seed[seed] for seed in seeds) for place, by_seed in scores.items()}


def jackknife(estimate: Callable[[Sequence[int]], float], seeds: Sequence[int]) -> list[float]:
    """The pseudo-values of an estimate: their t interval is that of the estimate.

    Fewer than two seeds have none.
    """
    n = len(seeds)
    if n < 2:
        return []
    whole = estimate(seeds)
    left_out = [estimate([other for other in seeds if other != seed]) for seed in seeds]
    return [n * whole - (n - 1) * each for each in left_out]
