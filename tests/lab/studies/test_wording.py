"""A comparison in one sentence: who is ahead, by how much, over how many seeds."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neumann.lab.metrics import ACCURACY, LOSS
from neumann.lab.report.formatting import format_interval
from neumann.lab.studies.statistics import Difference, paired_difference
from neumann.lab.studies.wording import describe_difference

NAN, INF = math.nan, math.inf
B = [93.0, 93.4, 92.8, 93.3, 93.1]
BETTER = [b + d for b, d in zip(B, (0.3, 0.5, 0.6, 0.2, 0.4), strict=True)]


@pytest.mark.parametrize(
    ("a", "b", "sentence"),
    [
        (BETTER, B, "neumann is ahead of sgd by 0.40 ± 0.20 points (n = 5, p = 0.0048)"),
        (B, BETTER, "neumann is behind sgd by 0.40 ± 0.20 points (n = 5, p = 0.0048)"),
        (
            [1.0, 2.0, 3.0],
            [1.5, 1.5, 3.1],
            "no clear difference between neumann and sgd: "
            "−0.03 ± 1.25 points (n = 3, p = 0.92, only 3 seeds)",
        ),
        (
            [93.0, 94.0],
            [1.0, 2.001],
            "neumann is ahead of sgd by 92.00 ± 0.01 points (n = 2, p < 0.001, only 2 seeds)",
        ),
        (
            [2.0],
            [1.6],
            "neumann is ahead of sgd by 0.40 points, but one seed is too few to test this (n = 1)",
        ),
        (
            [2.0, 3.0],
            [1.5, 2.5],
            "neumann is ahead of sgd by the same 0.50 points in each of 2 seeds; with no spread "
            "there is nothing to test (n = 2)",
        ),
        (B, B, "neumann and sgd are equal in each of 5 seeds"),
        ([1.0], [1.0], "neumann and sgd are equal in the one seed they share"),
        (
            [100 * right / 360 for right in (348, 349, 350)],
            [100 * right / 360 for right in (345, 346, 347)],
            "neumann is ahead of sgd by the same 0.83 points in each of 3 seeds; with no spread "
            "there is nothing to test (n = 3)",
        ),
        ([b + 3e-14 for b in B], B, "neumann and sgd are equal in each of 5 seeds"),
        ([], [], "neumann and sgd cannot be compared: they have no seed in common"),
        (
            [*BETTER, 90.0],
            [*B, NAN],
            "sgd diverged in 1 of 6 runs; in the others, neumann is ahead of sgd by 0.40 ± 0.20 "
            "points (n = 5, p = 0.0048)",
        ),
        (
            [NAN, NAN],
            [INF, 1.0],
            "neumann diverged in 2 of 2 runs and sgd diverged in 1 of 2 runs; no seed is left to "
            "compare",
        ),
        (
            [1e9, 2e9],
            [0.0, 1e9 + 5e8],
            "no clear difference between neumann and sgd: "
            "7.5e+08 ± 3.18e+09 points (n = 2, p = 0.2, only 2 seeds)",
        ),
    ],
)
def test_sentences(a, b, sentence):
    assert describe_difference("neumann", "sgd", paired_difference(a, b)) == sentence


@settings(deadline=None)
@given(st.floats(0.0011, 0.999), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_rounded_p_stays_on_its_side_of_the_threshold(p, level):
    sentence = describe_difference("a", "b", Difference(1.0, 0.5, 1.5, p, 9, pairs=9, level=level))
    shown = float(re.search(r"p = ([0-9.]+)\)", sentence)[1])
    assert (shown < 1 - level) == ("is ahead of" in sentence) == (p < 1 - level)


@pytest.mark.parametrize(
    ("found", "metric"),
    [
        (paired_difference([97.0, 93.0, 99.0], [60.0, 81.0, 70.0]), ACCURACY),
        (paired_difference([97.0, 97.0004, 97.0001], [97.0, 97.0, 97.0]), ACCURACY),
        (paired_difference([3.2, 3.1, 3.4], [3.3, 3.15, 3.45]), LOSS),
        (paired_difference([1e9, 2e9], [0.0, 1.5e9]), LOSS),
    ],
)
def test_sentence_and_table_round_alike(found, metric):
    shown = format_interval(found, metric)
    assert shown.lstrip("−") in describe_difference("a", "b", found, metric)


def test_an_interval_never_rounds_to_nothing():
    found = paired_difference([97.0, 97.0004, 97.0001], [97.0, 97.0, 97.0])
    assert format_interval(found) == "0.00017 ± 0.00052"
