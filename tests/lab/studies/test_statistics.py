"""Intervals and paired tests agree with scipy.stats, and leave out what diverged."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from neumann.lab.studies.statistics import (
    Difference,
    correct_by_holm,
    correct_differences,
    mean_interval,
    paired_difference,
    select_common_seeds,
)

NAN, INF = math.nan, math.inf
NUMBERS = st.floats(-1e3, 1e3).map(lambda value: round(value, 4))
LEVELS = st.sampled_from([0.5, 0.9, 0.95, 0.99])


def close(found, expected):
    return math.isclose(found, expected, rel_tol=1e-8, abs_tol=1e-9)


@settings(deadline=None)
@given(st.lists(NUMBERS, min_size=2, max_size=12), LEVELS)
def test_interval_matches_scipy(values, level):
    assume(max(values) - min(values) > 1e-3)
    found = mean_interval(values, level)
    expected = stats.t.interval(
        level, len(values) - 1, loc=sum(values) / len(values), scale=stats.sem(values)
    )
    assert close(found.low, expected[0])
    assert close(found.high, expected[1])
    assert close(found.mean, sum(values) / len(values))
    assert (found.n, found.diverged, found.level) == (len(values), 0, level)


@settings(deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=12), LEVELS)
def test_paired_test_matches_scipy(pairs, level):
    a, b = map(list, zip(*pairs, strict=True))
    differences = [x - y for x, y in pairs]
    assume(max(differences) - min(differences) > 1e-3)
    found = paired_difference(a, b, level)
    expected = stats.ttest_rel(a, b)
    bounds = expected.confidence_interval(level)
    assert close(found.p, expected.pvalue)
    assert close(found.low, bounds.low)
    assert close(found.high, bounds.high)
    if not close(found.p, 1 - level):
        assert (found.p < 1 - level) == (not found.low <= 0 <= found.high)


@settings(deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS) | st.just((NAN, 1.0)), max_size=8))
def test_swapping_the_arms_changes_the_sign(pairs):
    a, b = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    there, back = paired_difference(a, b), paired_difference(b, a)
    assert (there.n, there.diverged_a, there.p) == (back.n, back.diverged_b, back.p)
    if there.mean is not None:
        assert there.mean == -back.mean
    if there.low is not None:
        assert there.low == -back.high


@pytest.mark.parametrize(
    ("a", "b", "level", "mean", "difference"),
    [
        (
            [92.81, 92.67, 92.93],
            [92.80, 92.69, 92.90],
            0.99,
            (92.80333333333334, 92.05768464943522, 93.54898201723147),
            (0.0066666666666700776, -0.13753796181095468, 0.15087129514429481, 0.6913933000756596),
        ),
        (
            [1.0, 2.0, 3.0],
            [1.5, 1.5, 3.1],
            0.9,
            (2.0, 0.3141455391529515, 3.6858544608470485),
            (-0.03333333333333336, -0.88186147075719, 0.8151948040905234, 0.9191547916545556),
        ),
        (
            [1e200, 3e200],
            [0.0, 1e200],
            0.95,
            (2e200, -1.0706204736174694e201, 1.4706204736174693e201),
            (1.5e200, -4.8531023680873465e200, 7.853102368087347e200, 0.20483276469913345),
        ),
    ],
)
def test_published_numbers_do_not_change(a, b, level, mean, difference):
    """Values of version 0.1.0, which computed them without scipy.stats."""
    found = mean_interval(a, level)
    assert (found.mean, found.low, found.high) == pytest.approx(mean, rel=1e-12)
    found = paired_difference(a, b, level)
    assert (found.mean, found.low, found.high, found.p) == pytest.approx(difference, rel=1e-11)


def test_small_p_values_keep_their_digits():
    a = [float(value) for value in range(10)]
    b = [value - 100 - value / 100 for value in a]
    assert paired_difference(a, b).p == pytest.approx(stats.ttest_rel(a, b).pvalue, rel=1e-8)


def test_fewer_than_two_values():
    one = mean_interval([3.0])
    assert (one.mean, one.low, one.high, one.n) == (3.0, None, None, 1)
    none = mean_interval([])
    assert (none.mean, none.low, none.high, none.n) == (None, None, None, 0)
    pair = paired_difference([3.0], [1.0])
    assert (pair.mean, pair.low, pair.high, pair.p, pair.n) == (2.0, None, None, None, 1)
    assert paired_difference([], []).mean is None


def test_equal_values_have_an_interval_of_width_zero():
    same = mean_interval([93.1] * 3)
    assert (same.mean, same.low, same.high) == (93.1, 93.1, 93.1)


def test_diverged_runs_are_counted_and_left_out():
    found = mean_interval([1.0, NAN, 3.0, INF, -INF])
    assert (found.mean, found.n, found.diverged) == (2.0, 2, 3)
    assert mean_interval([NAN, NAN]).mean is None
    pairs = paired_difference([1.0, NAN, 3.0, NAN, 6.0], [0.0, 1.0, INF, NAN, 4.0])
    assert (pairs.mean, pairs.n) == (1.5, 2)
    assert (pairs.diverged_a, pairs.diverged_b, pairs.pairs) == (2, 2, 5)


def test_identical_pairs_and_differences_without_spread():
    assert paired_difference([0.1, 0.7], [0.1, 0.7]).p == 1.0
    # 0.3 − 0.2 and 0.2 − 0.1 are not the same float.
    constant = paired_difference([0.3, 0.2, 0.9], [0.2, 0.1, 0.8])
    assert constant.p is None
    assert constant.mean == pytest.approx(0.1)
    assert constant.high - constant.low < 1e-12
    assert paired_difference([90.1, 91.2], [90.0, 91.0]).p is not None


def test_values_near_the_largest_float():
    found = mean_interval([1.5e308, 1.7e308, 1.6e308])
    assert found.mean == pytest.approx(1.6e308)
    assert math.isfinite(paired_difference([1e200, 3e200], [0.0, 1e200]).p)


def test_invalid_arguments():
    with pytest.raises(ValueError, match="one value for each common seed; got 2 and 1 values"):
        paired_difference([1.0, 2.0], [1.0])
    for level in (0.0, 1.0, 95, NAN):
        with pytest.raises(ValueError, match=f"level must be .*; got {level}"):
            mean_interval([1.0, 2.0], level)
        with pytest.raises(ValueError, match="level must be"):
            paired_difference([1.0, 2.0], [1.0, 3.0], level)


def test_arms_are_paired_by_seed():
    a, b = select_common_seeds({3: 0.3, 0: 0.0, 7: 0.7}, {7: 1.7, 1: 1.1, 0: 1.0})
    assert (a, b) == ([0.0, 0.7], [1.0, 1.7])


def test_holm():
    """The example of Holm's method: sorted p values times n, n − 1, …, never falling, at most 1."""
    assert correct_by_holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert correct_by_holm([0.5, 0.6]) == [1.0, 1.0]
    assert correct_by_holm([]) == []


def test_differences_are_corrected_for_those_that_were_tested():
    first, same = [1.0, 2.0, 4.0], [0.5, 1.5, 3.5]  # the same difference in each seed: no test
    tested = [paired_difference(first, other) for other in ([0.9, 1.9, 3.7], [1.0, 2.2, 3.1])]
    found = correct_differences([None, paired_difference(first, same), *tested])
    assert found[0] is None
    assert found[1].p is None
    assert [each.p for each in found[2:]] == correct_by_holm([each.p for each in tested])
    assert [replace(each, p=None) for each in found[2:]] == [replace(t, p=None) for t in tested]


def test_a_difference_is_clear_below_the_level_and_with_a_test():
    assert not Difference(1.0, 0.0, 2.0, 0.051, 5).is_clear
    assert Difference(1.0, 0.1, 1.9, 0.049, 5).is_clear
    assert not Difference(1.0, 1.0, 1.0, None, 5).is_clear
