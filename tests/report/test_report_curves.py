"""Runs as they are read, their means over seeds, and thinning."""

import math

import pytest
from fake_records import PER_EPOCH, fake_run

from neumann.report.curves import ArmRuns, Curve, arm_curves, thinned
from neumann.report.runs import number, read_run


def arm(tmp_path, *options, opt="sgd"):
    runs = [
        read_run(fake_run(tmp_path / str(seed), opt, seed, **given))
        for seed, given in enumerate(options)
    ]
    return ArmRuns(opt, 0, tuple(runs))


def accuracy(run):
    return run.track("epoch", "accuracy")


def test_mean_and_spread_over_seeds(tmp_path):
    found = arm(tmp_path, {}, {}, {})
    (curve,) = arm_curves(found, "epochs", accuracy)
    values = [list(accuracy(run).values()) for run in found.runs]
    assert curve.x == (1, 2, 3, 4, 5, 6)
    assert curve.y == pytest.approx([sum(column) / 3 for column in zip(*values, strict=True)])
    assert curve.low == tuple(map(min, zip(*values, strict=True)))
    assert curve.high == tuple(map(max, zip(*values, strict=True)))


def test_seconds_are_means_of_the_seeds_at_equal_steps(tmp_path):
    (curve,) = arm_curves(arm(tmp_path, {}, {}), "seconds", accuracy)
    assert curve.x == pytest.approx([0.5 * epoch + 0.01 for epoch in range(1, 7)])


def test_time_between_epochs_is_interpolated(tmp_path):
    run = read_run(fake_run(tmp_path))
    assert run.seconds_at(PER_EPOCH // 2) == pytest.approx(0.25)
    assert run.seconds_at(7 * PER_EPOCH) == pytest.approx(3.5)
    assert math.isnan(read_run(fake_run(tmp_path / "new", ended=0)).seconds_at(5))


def test_diverged_runs_are_drawn_apart(tmp_path):
    found = arm(tmp_path, {}, {"diverged": 50}, {})
    mean, failed = arm_curves(found, "steps", accuracy)
    assert (mean.part, len(mean.x)) == ("mean", 6)
    assert (failed.part, failed.x) == ("diverged", (20.0, 40.0))


def test_one_that_diverged_at_once_has_no_curve(tmp_path):
    assert arm_curves(arm(tmp_path, {"diverged": 3}), "steps", accuracy) == []


def test_runs_in_the_making_wait_for_those_that_have_ended(tmp_path):
    (mean,) = arm_curves(arm(tmp_path, {}, {"ended": 2}), "steps", accuracy)
    assert len(mean.x) == 6
    assert not mean.spread
    (mean,) = arm_curves(arm(tmp_path / "b", {"ended": 3}, {"ended": 2}), "steps", accuracy)
    assert len(mean.x) == 2


def test_a_value_that_is_none_is_a_gap():
    assert math.isnan(number(None))
    assert math.isnan(number(math.inf))
    assert math.isnan(number(True))
    assert math.isnan(number("far"))
    assert math.isnan(number(1e300))
    assert number(3) == 3.0


def test_thinning_keeps_peaks_and_gaps():
    y = [math.sin(i / 500) for i in range(10_000)]
    y[4321], y[7000] = 9.0, -9.0
    y[2000:3000] = [math.nan] * 1000
    x = tuple(map(float, range(10_000)))
    low = tuple(v - 1 for v in y)
    curve = thinned(Curve("a", 0, "mean", x, tuple(y), low, tuple(v + 1 for v in y)))
    assert len(curve.x) <= 2000
    assert max(v for v in curve.y if v == v) == 9.0
    assert min(v for v in curve.y if v == v) == -9.0
    assert list(curve.x) == sorted(curve.x)
    inside = [v for x, v in zip(curve.x, curve.y, strict=True) if 2000 <= x < 2990]
    assert inside
    assert all(math.isnan(v) for v in inside)
    assert all(a <= b or b != b for a, b in zip(curve.low, curve.y, strict=True))


def test_thinning_leaves_short_curves_alone_and_makes_no_band():
    short = Curve("a", 0, "mean", (1.0,), (2.0,), (2.0,), (2.0,))
    assert thinned(short) is short
    y = tuple(float(i % 7) for i in range(5000))
    assert not thinned(Curve("a", 0, "mean", tuple(map(float, range(5000))), y, y, y)).spread
