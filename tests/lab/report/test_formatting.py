"""How a report writes numbers."""

import math

import pytest

from neumann.lab.report.formatting import NONE, format_seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.234, "1.23 s"),
        (12.34, "12.3 s"),
        (660, "660 s (11 min)"),
        (3725, "3,725 s (1 h 2 min)"),
        (None, NONE),
        (math.inf, NONE),
    ],
)
def test_seconds_keep_their_unit_before_minutes_and_hours(value, text):
    assert format_seconds(value, " s") == text
    assert format_seconds(value) == text.replace(" s", "")
