"""Schedules: closed forms, held to their formulas."""

import math
from itertools import pairwise

import pytest

from neumann.lab.errors import UsageError
from neumann.lab.schedules import SCHEDULES, factor

TOTAL, RAMP, EPOCH = 1400, 100, 10


def at(schedule, step, ramp=RAMP):
    return factor(schedule, step, total_steps=TOTAL, ramp_steps=ramp, steps_per_epoch=EPOCH)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_have_a_ramp_to_the_peak(schedule):
    assert [at(schedule, step) for step in (0, 49, 99)] == [0.01, 0.5, 1.0]
    assert at(schedule, RAMP) == 1.0
    assert at(schedule, 0, ramp=0) == 1.0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_none_rises_after_the_ramp_or_leaves_its_range(schedule):
    factors = [at(schedule, step) for step in range(RAMP, TOTAL + 10)]
    assert all(a >= b for a, b in pairwise(factors))
    assert min(factors) >= 0


def test_formulas():
    middle = (RAMP + TOTAL) // 2
    assert at("constant", middle) == 1.0
    assert at("linear", middle) == 0.5
    assert at("cosine", middle) == pytest.approx(0.5)
    assert at("cosine", RAMP + 325) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert at("linear", TOTAL) == 0
    assert [at("step", RAMP + s) for s in (399, 400, 800)] == [1.0, 0.3, pytest.approx(0.09)]
    assert at("inverse", RAMP + EPOCH) == 0.5


def test_the_rescaled_steps_fall_where_the_paper_has_them():
    drops = [s for s in range(1, TOTAL) if at("rescaled", s, 0) < at("rescaled", s - 1, 0)]
    assert drops == [TOTAL * 2 // 7, TOTAL * 4 // 7, TOTAL * 6 // 7]


def test_unknown():
    with pytest.raises(UsageError, match="unknown schedule 'cos'; the nearest: cosine"):
        at("cos", 0)
