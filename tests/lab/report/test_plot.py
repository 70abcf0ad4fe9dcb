"""Curves over seeds, their thinning, and the sentences that explain marks."""

import math

import pytest

from neumann.lab.report.plot import Curve, explain_marks, make_curves, thin
from neumann.lab.report.runs import ArmRuns, read_run
from neumann.lab.report.study_records import read_study
from neumann.lab.report.training_plots import plot_metrics
from tests.support.fake_records import fake_run


def make_arm(folder, *options):
    runs = [
        read_run(fake_run(folder / str(seed), "sgd", seed, **given))
        for seed, given in enumerate(options)
    ]
    return ArmRuns("sgd", 0, tuple(runs))


def accuracy(run):
    return run.series("epoch", "accuracy")


def test_mean_and_range_over_seeds(tmp_path):
    arm = make_arm(tmp_path, {}, {}, {})
    (curve,) = make_curves(arm, "epochs", accuracy)
    values = [list(accuracy(run).values()) for run in arm.runs]
    assert curve.x == (1, 2, 3, 4, 5, 6)
    assert curve.y == pytest.approx([sum(column) / 3 for column in zip(*values, strict=True)])
    assert curve.low == tuple(map(min, zip(*values, strict=True)))
    assert curve.high == tuple(map(max, zip(*values, strict=True)))


def test_seconds_are_means_over_the_seeds_at_equal_steps(tmp_path):
    (curve,) = make_curves(make_arm(tmp_path, {}, {}), "seconds", accuracy)
    assert curve.x == pytest.approx([0.5 * epoch + 0.01 for epoch in range(1, 7)])


def test_diverged_runs_have_curves_of_their_own(tmp_path):
    mean, failed = make_curves(make_arm(tmp_path, {}, {"diverged": 50}, {}), "steps", accuracy)
    assert (mean.part, len(mean.x)) == ("mean", 6)
    assert (failed.part, failed.x) == ("diverged", (20.0, 40.0))


def test_a_run_that_diverged_at_once_has_no_curve(tmp_path):
    assert make_curves(make_arm(tmp_path, {"diverged": 3}), "steps", accuracy) == []


def test_unfinished_runs_are_averaged_only_among_themselves(tmp_path):
    (mean,) = make_curves(make_arm(tmp_path, {}, {"ended": 2}), "steps", accuracy)
    assert len(mean.x) == 6
    assert not mean.has_band
    unfinished = make_arm(tmp_path / "b", {"ended": 3}, {"ended": 2})
    (mean,) = make_curves(unfinished, "steps", accuracy)
    assert len(mean.x) == 2


def test_a_value_missing_in_one_seed_makes_a_gap(tmp_path):
    arm = make_arm(tmp_path, {}, {})

    def read(run):
        return {1: 5.0, 2: math.nan if run.seed else 5.0}

    (curve,) = make_curves(arm, "steps", read)
    assert curve.y[0] == 5.0
    assert all(math.isnan(side[1]) for side in (curve.y, curve.low, curve.high))


def test_thinning_keeps_peaks_and_gaps():
    y = [math.sin(i / 500) for i in range(10_000)]
    y[4321], y[7000] = 9.0, -9.0
    y[2000:3000] = [math.nan] * 1000
    x = tuple(map(float, range(10_000)))
    low = tuple(v - 1 for v in y)
    curve = thin(Curve("a", 0, "mean", x, tuple(y), low, tuple(v + 1 for v in y)))
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
    assert thin(short) is short
    y = tuple(float(i % 7) for i in range(5000))
    assert not thin(Curve("a", 0, "mean", tuple(map(float, range(5000))), y, y, y)).has_band


def test_marks_are_explained(tmp_path):
    def explain(arm, name="", **options):
        folder = tmp_path / (name or arm.replace(":", "_"))
        study = read_study(fake_run(folder, arm, **options))
        return explain_marks(plot_metrics(study, "seconds"))

    often = "neumann:warmup_epochs=0,reset_epochs=0.05,reset_growth=1"
    assert explain("sgd") == ""
    both = "neumann:warmup_epochs=1"
    assert explain(both) == "Shaded: the warm-up of neumann; dotted: its resets."
    assert explain("neumann", ended=2) == "Shaded: the warm-up of neumann."
    assert explain("neumann:warmup_epochs=0") == ""  # nothing after the start of the series
    assert explain("neumann:warmup_epochs=0,reset_epochs=1") == "Dotted: the resets of neumann."
    assert explain(often) == "The 119 resets of neumann are too many to mark."
    assert explain(both, "old", timetable=False) == (
        "Shaded: the warm-up of neumann; dotted: its resets. "
        "Older records: only resets that a recorded line mentions are marked."
    )
