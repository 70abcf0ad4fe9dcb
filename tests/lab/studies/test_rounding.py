"""What floats make of equal differences is no spread: a number never shows it."""

import pytest

from neumann.lab.metrics import ACCURACY
from neumann.lab.report.formatting import format_interval, format_limits
from neumann.lab.studies.rounding import half_width
from neumann.lab.studies.statistics import mean_interval, paired_difference

# Three right answers of 360 more, and floats make a little more or less than 0.8333 % of each.
A = [100 * right / 360 for right in (345, 346, 347)]
B = [100 * right / 360 for right in (348, 349, 350)]


def test_differences_that_are_equal_up_to_rounding_have_no_spread():
    found = paired_difference(A, B)
    assert 0 < found.high - found.low < 1e-12
    assert half_width(found) == 0
    assert format_interval(found, ACCURACY, signed=True) == "−0.83 ± 0.00"
    assert format_limits(found, ACCURACY) == "−0.83 to −0.83"


def test_scores_that_are_equal_up_to_rounding_have_no_spread():
    score = A[0]
    assert format_interval(mean_interval([score, score + 3e-14])) == "95.83 ± 0.00"


def test_a_difference_that_is_only_rounding_is_zero():
    found = paired_difference([score + 3e-14 for score in A], A)
    assert found.mean != 0
    assert format_interval(found, ACCURACY, signed=True) == "+0.00 ± 0.00"


@pytest.mark.parametrize(("spread", "text"), [(1e-5, "0.000005 ± 0.000064"), (0.0, "0.00 ± 0.00")])
def test_a_small_spread_keeps_its_digits(spread, text):
    assert format_interval(mean_interval([0.0, spread])) == text
