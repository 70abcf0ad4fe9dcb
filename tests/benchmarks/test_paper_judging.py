"""Verdicts on the paper's claims: intervals, equivalence and Holm's method, by hand."""

import math

import pytest
from scipy import stats

from benchmarks.paper.claim_tests import fit_slope, measure_early_drops
from benchmarks.paper.judging import (
    Evidence,
    Finding,
    Verdict,
    combine,
    correct_findings,
    judge,
    weigh_direction,
    weigh_equivalence,
    weigh_spread,
)


def spread_around(mean, half, n=5):
    """Values whose 95 % interval is mean ± half."""
    pattern = [k - (n - 1) / 2 for k in range(n)]
    deviation = math.sqrt(sum(k * k for k in pattern) / (n - 1))
    scale = half * math.sqrt(n) / stats.t.ppf(0.975, n - 1) / deviation
    return [mean + scale * k for k in pattern]


def decide(*evidence):
    """The verdict on a claim that is judged alone."""
    found = combine(evidence)
    judgment = judge(found, found)
    assert not judgment.weak
    return judgment.verdict


@pytest.mark.parametrize(
    ("mean", "half", "null", "claimed", "verdict"),
    [
        (0.9, 0.3, 0.0, 0.8, Verdict.SUPPORTED),
        (0.3, 0.2, 0.0, 0.8, Verdict.SMALLER),  # the interval excludes 0 and 0.8
        (0.1, 0.3, 0.0, 0.8, Verdict.NOT_SUPPORTED),
        (-0.5, 0.3, 0.0, 0.8, Verdict.NOT_SUPPORTED),
        (0.3, 0.9, 0.0, 0.8, Verdict.INCONCLUSIVE),  # wide: no evidence against the claim
        (0.0, 0.15, -0.2, -0.2, Verdict.SUPPORTED),  # loses less than 0.2
        (-0.1, 0.15, -0.2, -0.2, Verdict.INCONCLUSIVE),
        (-0.4, 0.15, -0.2, -0.2, Verdict.NOT_SUPPORTED),
        (0.05, 0.1, 0.0, 0.0, Verdict.INCONCLUSIVE),
        (-0.2, 0.1, 0.0, 0.0, Verdict.NOT_SUPPORTED),
    ],
)
def test_known_intervals(mean, half, null, claimed, verdict):
    found = weigh_direction(spread_around(mean, half), null, claimed)
    assert (found.mean, found.n) == (pytest.approx(mean), 5)
    assert (found.low, found.high) == (pytest.approx(mean - half), pytest.approx(mean + half))
    assert decide(found) == verdict


def test_p_is_below_five_percent_exactly_if_the_interval_excludes_the_number():
    for half, excluded in ((0.499, True), (0.501, False)):
        found = weigh_direction(spread_around(0.5, half), 0.0, 1.0)
        assert (found.p_for < 0.05, found.p_against < 0.05) == (excluded, excluded)
        assert found.p_for == pytest.approx(found.p_against)


@pytest.mark.parametrize(
    ("mean", "half", "verdict"),
    [
        (0.05, 0.1, Verdict.SUPPORTED),
        (-0.05, 0.1, Verdict.SUPPORTED),
        (0.05, 0.3, Verdict.INCONCLUSIVE),
        (0.25, 0.1, Verdict.INCONCLUSIVE),
        (0.4, 0.1, Verdict.NOT_SUPPORTED),
        (-0.4, 0.1, Verdict.NOT_SUPPORTED),
    ],
)
def test_equivalence_within_the_margin(mean, half, verdict):
    assert decide(weigh_equivalence(spread_around(mean, half), 0.2)) == verdict


def test_equivalence_is_two_one_sided_tests():
    values = [0.02, 0.11, -0.05, 0.16, 0.07, -0.02]
    found = weigh_equivalence(values, 0.2)
    lower = stats.ttest_1samp(values, -0.2, alternative="greater").pvalue
    upper = stats.ttest_1samp(values, 0.2, alternative="less").pvalue
    assert found.p_for == pytest.approx(max(lower, upper))
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.9)
    assert (found.low, found.high, found.level) == (pytest.approx(low), pytest.approx(high), 0.9)


def test_the_same_bits_are_equal():
    found = weigh_equivalence([0.0, 0.0, 0.0], 0.2)
    assert (found.p_for, found.p_against) == (0.0, 1.0)


def test_the_same_bits_exclude_an_effect():
    lost = weigh_direction([0.0, 0.0, 0.0], -0.2, -0.2)
    assert (lost.p_for, lost.p_against) == (0.0, 1.0)
    gained = weigh_direction([0.0, 0.0, 0.0], 0.0, 0.8)
    assert (gained.p_for, gained.p_against) == (1.0, 0.0)


def test_a_difference_without_spread_is_no_evidence():
    found = weigh_direction([0.3, 0.3, 0.3], 0.0, 0.8)
    assert (found.p_for, found.p_against) == (1.0, 1.0)


def test_one_run_says_nothing():
    for found in (weigh_direction([0.3, math.nan], 0.0, 0.8), weigh_equivalence([0.3], 0.2)):
        assert decide(found) == Verdict.INCONCLUSIVE


def test_spread_beside_the_variance_distribution():
    values = [94.0, 94.1, 94.3, 93.9, 94.2, 94.1, 94.0, 94.2, 94.1, 94.1]
    found = weigh_spread(values, 0.29)
    squares = 9 * 0.0133333333  # the sum of squares is 0.12
    assert found.mean == pytest.approx(math.log(0.29 / math.sqrt(0.12 / 9)), rel=1e-6)
    assert 0.29 / math.exp(found.low) == pytest.approx(math.sqrt(squares / 2.7004), rel=1e-3)
    assert 0.29 / math.exp(found.high) == pytest.approx(math.sqrt(squares / 19.0228), rel=1e-3)
    assert decide(found) == Verdict.SUPPORTED
    assert decide(weigh_spread(values, 0.05)) == Verdict.NOT_SUPPORTED
    assert decide(weigh_spread(values, 0.1)) == Verdict.INCONCLUSIVE
    assert decide(weigh_spread([94.0, 94.0, 94.0], 0.1)) == Verdict.SUPPORTED


def evidence(p_for, p_against):
    return Evidence(0.0, -1.0, 1.0, 5, p_for, p_against)


def test_all_tests_have_to_hold_and_one_is_enough_to_fail():
    found = combine([evidence(0.001, 1.0), evidence(0.04, 0.3), evidence(1.0, 0.01)])
    assert (found.p_for, found.p_against) == (1.0, pytest.approx(0.03))
    assert judge(found, found).verdict == Verdict.NOT_SUPPORTED


def test_holm_by_hand_with_claims_that_have_not_run():
    """Of four listed claims one has not run: 0.01 × 4, 0.015 × 3, 0.04 × 2, and 1."""
    found = {1: Finding(0.01, 1.0), 2: Finding(0.04, 0.012), 3: Finding(0.015, 0.5)}
    corrected = correct_findings(found, (1, 2, 3, 4))
    assert corrected[1].p_for == pytest.approx(0.04)
    assert corrected[3].p_for == pytest.approx(0.045)
    assert corrected[2].p_for == pytest.approx(0.08)
    assert corrected[2].p_against == pytest.approx(0.048)
    judged = {number: judge(found[number], corrected[number]) for number in found}
    assert {number: (each.verdict, each.weak) for number, each in judged.items()} == {
        1: (Verdict.SUPPORTED, False),
        2: (Verdict.SMALLER, True),  # 0.04 alone, 0.08 corrected
        3: (Verdict.SUPPORTED, False),
    }


def test_weak_evidence_against_a_claim():
    found = {1: Finding(1.0, 0.03), 2: Finding(1.0, 0.5)}
    corrected = correct_findings(found, (1, 2))
    judgment = judge(found[1], corrected[1])
    assert (judgment.verdict, judgment.weak) == (Verdict.NOT_SUPPORTED, True)
    assert judgment.p == pytest.approx(0.06)
    assert judge(found[2], corrected[2]).verdict == Verdict.INCONCLUSIVE


def test_only_listed_claims_are_corrected():
    with pytest.raises(ValueError, match=r"claims \[7\] are not on the list"):
        correct_findings({7: Finding()}, (1, 2))


def test_an_arm_that_diverged_is_not_supported_by_its_other_runs():
    good, bad = Finding(0.001, 1.0), Finding(1.0, 0.001)
    assert judge(good, good, may_support=False).verdict == Verdict.INCONCLUSIVE
    assert judge(bad, bad, may_support=False).verdict == Verdict.NOT_SUPPORTED


def test_slope_of_a_line():
    assert fit_slope([7, 9, 11, 13, 15], [1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(0.5)


def test_early_drops_are_those_of_the_first_third():
    run = {"curve": [50.0, 40.0, 60.0, 55.0, 80.0, 10.0, 90.0, 10.0, 90.0, 10.0, 90.0, 90.0]}
    assert measure_early_drops(run) == pytest.approx((10 + 5) / 3)
    assert math.isnan(measure_early_drops({"diverged": True}))
    steady = run | {"recalibrated_curve": [50.0, 60.0, 70.0, 80.0, *run["curve"][4:]]}
    assert measure_early_drops(steady) == 0.0
