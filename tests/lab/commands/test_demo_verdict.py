"""The demo's sentence is true whatever the scores are."""

import math
from pathlib import Path

from neumann.lab.commands.demo_verdict import state_verdict
from neumann.lab.metrics import ACCURACY
from neumann.lab.studies.results import ArmResult, Comparison, FinishedRun
from neumann.lab.studies.statistics import mean_interval, paired_difference

FIRST = [98.0, 98.1, 97.9, 98.2, 97.8]
NEAR = [98.1, 97.9, 98.0, 98.0, 98.1]
LOWER = [96.0, 96.2, 95.7, 96.3, 95.9]
HIGHER = [99.0, 99.2, 98.7, 99.3, 98.9]
DIVERGED = [math.nan] * 5


def compare(*scores):
    rows = []
    for name, values in zip("ABCDE", scores, strict=False):
        runs = {
            seed: FinishedRun(Path(), ACCURACY, score, None, None, None)
            for seed, score in enumerate(values)
        }
        rows.append(ArmResult(name, name, runs, mean_interval(values), None, None, None))
    comparison = Comparison(Path(), tuple(rows), len(scores[0]), None, 0).compare_with(0)
    return state_verdict(comparison, 40)


START = "After 40 steps and over 5 seeds, A "


def test_each_group_is_named():
    expected = "is ahead of B and C, ties with D, and is behind E."
    assert compare(FIRST, LOWER, LOWER, NEAR, HIGHER) == START + expected


def test_a_tie_is_called_a_tie():
    assert compare(FIRST, NEAR, FIRST) == f"{START}ties with B and C."


def test_several_tests_are_corrected():
    slight = [97.9, 98.0, 97.89, 98.0, 97.75]  # p is 0.04 alone
    p = paired_difference(FIRST, slight).p
    assert 0.05 / 4 < p < 0.05
    assert compare(FIRST, slight) == f"{START}is ahead of B."
    assert compare(FIRST, slight, NEAR, NEAR, NEAR) == f"{START}ties with B, C, D and E."


def test_what_cannot_be_tested_is_not_judged():
    shifted = [score - 1 for score in FIRST]
    assert compare(FIRST, shifted, LOWER) == f"{START}is ahead of C, and cannot be compared with B."


def test_divergence_is_named():
    once = [math.nan, *LOWER[1:]]
    assert compare(FIRST, once) == f"{START}is ahead of B; B diverged in 1 of 5 runs."
    expected = "cannot be compared with B; B diverged in 5 of 5 runs."
    assert compare(FIRST, DIVERGED) == START + expected


def test_one_seed_says_nothing():
    few = ". One seed is too few to test this."
    assert compare([98.0], [97.0], [99.0]) == f"After 40 steps, A is 2nd of 3{few}"
    assert compare([98.0], [98.0]) == f"After 40 steps, A is joint 1st of 2{few}"
    assert compare([98.0], [math.nan]) == f"After 40 steps, A is 1st of 2{few}"
    assert compare([math.nan], [98.0]) == f"After 40 steps, A diverged{few}"
