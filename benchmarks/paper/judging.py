"""What a test shows about a claim: intervals, p values, and the verdict.

A test has two hypotheses to reject. Rejecting "the effect is at most `null`" speaks for the claim;
rejecting "the effect is at least `claimed`" speaks against it. Both p values are two-sided, so that
p < 0.05 is the same as a 95 % interval that excludes the number. A claim with several tests needs
all of them (p is the largest), and fails with any of them (p is the smallest times their number).

Both are also corrected by Holm's method over the claims that touch the test set, where one that has
not been run counts as p = 1. The intervals decide the verdict, and the corrected p whether it is
weak. If the corrected p decided, then with the seeds that we can pay for even a claim that is true
would mostly come out as inconclusive, and one that is false as not supported.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from neumann.lab.studies.statistics import (
    Interval,
    correct_by_holm,
    mean_interval,
    paired_difference,
)

LEVEL = 0.05  # p below it is evidence


class Verdict(StrEnum):
    SUPPORTED = "supported"
    SMALLER = "supported, but smaller"  # than the paper says
    NOT_SUPPORTED = "not supported"
    INCONCLUSIVE = "inconclusive"
    NOT_RUN = "not run yet"
    NOT_TESTABLE = "not testable here"


@dataclass(frozen=True)
class Evidence:
    """What one test shows; the effect is positive in the direction of the claim."""

    mean: float
    low: float  # of the interval
    high: float
    n: int  # seeds that went in
    p_for: float  # 1.0: no evidence
    p_against: float
    level: float = 0.95  # of the interval


@dataclass(frozen=True)
class Finding:
    """What all tests of a claim show."""

    p_for: float = 1.0
    p_against: float = 1.0


def weigh_direction(effects: Sequence[float], null: float, claimed: float) -> Evidence:
    """Is the mean effect above `null`, or below `claimed`? By t tests over the seeds."""
    found = mean_interval(effects)
    if found.mean is None or found.low is None or found.high is None:
        return _say_nothing(found)
    above, below = found.mean > null, found.mean < claimed
    return Evidence(
        found.mean,
        found.low,
        found.high,
        found.n,
        _p_value(effects, null) if above else 1.0,
        _p_value(effects, claimed) if below else 1.0,
    )


def weigh_equivalence(effects: Sequence[float], margin: float) -> Evidence:
    """Is the mean effect within ± `margin`? By two one-sided t tests.

    The interval is the one of 90 %, which lies within the margin if both tests reject at 5 %.
    """
    found = mean_interval(effects, level=0.9)
    if found.mean is None or found.low is None or found.high is None:
        return _say_nothing(found)
    inside = abs(found.mean) < margin
    nearest = math.copysign(margin, found.mean)
    p_for = max(_p_value(effects, -margin), _p_value(effects, margin)) / 2 if inside else 1.0
    return Evidence(
        found.mean,
        found.low,
        found.high,
        found.n,
        p_for,
        1.0 if inside else _p_value(effects, nearest),
        level=0.9,
    )


def weigh_spread(values: Sequence[float], limit: float) -> Evidence:
    """Is the standard deviation below `limit`? By the χ² distribution of the variance.

    The effect is log(limit / deviation).
    """
    from scipy import stats  # type: ignore[import-untyped, unused-ignore]

    n = len(values)
    if n < 2:
        return Evidence(math.nan, -math.inf, math.inf, n, 1.0, 1.0)
    mean = math.fsum(values) / n
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    if variance == 0:
        return Evidence(math.inf, math.inf, math.inf, n, 0.0, 1.0)
    freedom = n - 1
    share = freedom * variance / limit**2
    smaller, larger = stats.chi2.cdf(share, freedom), stats.chi2.sf(share, freedom)
    ends = [freedom * variance / stats.chi2.ppf(q, freedom) for q in (0.025, 0.975)]
    effect, low, high = (math.log(limit / math.sqrt(v)) for v in (variance, *ends))
    p_for = min(1.0, 2 * float(smaller)) if effect > 0 else 1.0
    p_against = min(1.0, 2 * float(larger)) if effect < 0 else 1.0
    return Evidence(effect, low, high, n, p_for, p_against)


def combine(evidence: Sequence[Evidence]) -> Finding:
    """All tests have to speak for the claim; one that speaks against it is enough."""
    smallest = min(each.p_against for each in evidence)
    return Finding(
        max(each.p_for for each in evidence),
        min(1.0, len(evidence) * smallest),
    )


@dataclass(frozen=True)
class Judgment:
    verdict: Verdict
    weak: bool = False  # corrected over all claims, p is not below 0.05
    p: float = 1.0  # of what decides, corrected


def correct_findings(found: Mapping[int, Finding], listed: Sequence[int]) -> dict[int, Finding]:
    """The findings by number, with both p values corrected over all of the list.

    A claim of the list without a finding has not been run, and counts as p = 1.
    """
    unlisted = found.keys() - set(listed)
    if unlisted:
        raise ValueError(f"claims {sorted(unlisted)} are not on the list of those to correct for")
    all_found = [found.get(number, Finding()) for number in listed]
    p_for = correct_by_holm([each.p_for for each in all_found])
    p_against = correct_by_holm([each.p_against for each in all_found])
    corrected = dict(zip(listed, map(Finding, p_for, p_against), strict=True))
    return {number: corrected[number] for number in found}


def judge(found: Finding, corrected: Finding, *, may_support: bool = True) -> Judgment:
    """The verdict on a claim whose tests have run.

    If runs of the arm that a claim speaks for diverged, `may_support` is False.
    """
    supported, excluded = found.p_for < LEVEL and may_support, found.p_against < LEVEL
    if supported:
        verdict = Verdict.SMALLER if excluded else Verdict.SUPPORTED
        return Judgment(verdict, corrected.p_for >= LEVEL, corrected.p_for)
    if excluded:
        weak = corrected.p_against >= LEVEL
        return Judgment(Verdict.NOT_SUPPORTED, weak, corrected.p_against)
    return Judgment(Verdict.INCONCLUSIVE, p=corrected.p_for)


def _say_nothing(found: Interval) -> Evidence:
    """Fewer than two runs came to their end, so there is no interval."""
    mean = math.nan if found.mean is None else found.mean
    return Evidence(mean, -math.inf, math.inf, found.n, 1.0, 1.0, found.level)


def _p_value(effects: Sequence[float], number: float) -> float:
    """Two-sided, of the t test of the effects against a number.

    If all effects are 0, as where both arms compute the same bits, no spread is needed to tell them
    from another number. Any other effect without spread shows nothing.
    """
    if not any(effects):
        return 1.0 if number == 0 else 0.0
    p = paired_difference(list(effects), [number] * len(effects)).p
    return 1.0 if p is None else p
