"""Plots of training: forces, recalibration and learning rates; and how they are drawn."""

import io
import json
from dataclasses import replace
from xml.etree.ElementTree import fromstring

import pytest
from PIL import Image

from neumann.lab.metrics import ACCURACY, LOSS
from neumann.lab.report.drawing import draw
from neumann.lab.report.palette import line_style
from neumann.lab.report.study_records import read_study
from neumann.lab.report.training_plots import (
    plot_forces,
    plot_metrics,
    plot_recalibration,
    plot_score,
    plot_sensitivity,
)
from neumann.lab.storage import strict_json
from tests.support.fake_records import fake_comparison, fake_sweep

pytestmark = pytest.mark.slow

HOSTILE = (  # the colon keeps what is before = from being an arm's name
    "sgd:<script>window.hacked=1</script>",
    'sgd:"><img src=x onerror="hacked=1">',
    "$\\frac{a$ _b",
    "{{ 7 * 6 }}{% raw %}",
)


def drawn_parts(plot):
    """Return (arm, part) of what the SVG of a plot shows, in its order."""
    elements = fromstring(draw(plot).svg).iter()
    return [(e.get("data-curve"), e.get("data-part")) for e in elements if e.get("data-part")]


def test_forces_leave_zeros_out(tmp_path):
    study = read_study(fake_comparison(tmp_path, {"neumann:warmup_epochs=1": {}, "sgd": {}}, 2))
    distance, forces = plot_forces(study, "epochs")
    assert {curve.label for curve in distance.curves} == {"neumann"}
    assert [curve.part for curve in forces.curves] == ["repulsive force", "attractive force"]
    assert all(value != 0 for curve in forces.curves for value in curve.y)
    assert distance.phases[0].resets == (21 / 20,)
    assert draw(forces).png


def test_recalibrated_accuracy_appears_next_to_the_plain_one(tmp_path):
    study = read_study(fake_comparison(tmp_path / "a", {"sgd": {}}, 2, batchnorm=True))
    plot = plot_recalibration(study, "epochs")
    assert [curve.part for curve in plot.curves] == ["plain", "recalibrated"]
    assert plot.curves[1].y[-1] == pytest.approx(plot.curves[0].y[-1] + 0.6)
    other = read_study(fake_comparison(tmp_path / "b", {"sgd": {}}))
    assert plot_recalibration(other, "epochs") is None


def hold_back(folder, epochs, accuracy=20.0):
    """Let a run learn nothing in its first epochs."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "epoch" and line["epoch"] <= epochs:
            line["accuracy"] = accuracy
    path.write_bytes(b"".join(map(strict_json.dumps, lines)))


def compare_with_a_late_arm(folder, target=None):
    arms = {"sgd": {"best": 99.0}, "adam": {"best": 97.0}, "adamw": {"best": 95.0}}
    fake_comparison(folder, arms, 2, epochs=20, target=target)
    for seed in range(2):
        hold_back(folder / "adamw" / f"seed-{seed}", 11)
    return read_study(folder)


@pytest.mark.parametrize("axis", ["epochs", "steps", "seconds"])
def test_an_arm_that_rises_late_does_not_squeeze_the_ends_of_all(tmp_path, axis):
    plot = plot_score(compare_with_a_late_arm(tmp_path), axis)
    ends = [curve.low[-1] for curve in plot.curves]
    assert 90 < plot.bottom < min(ends)
    assert plot.caption == f"The axis starts at {plot.bottom:.3g} %; lower values are not shown."


def test_a_cut_axis_shows_a_near_target_and_no_far_one(tmp_path):
    near = plot_score(compare_with_a_late_arm(tmp_path / "a", 92.0), "steps")
    assert 90 < near.bottom < 92
    far = plot_score(compare_with_a_late_arm(tmp_path / "b", 60.0), "steps")
    assert far.bottom > 90


def test_an_axis_is_never_cut_where_an_arm_ends(tmp_path):
    arms = {"sgd": {}, "adam": {}, "adamw": {"best": 75.0}}
    plot = plot_score(read_study(fake_comparison(tmp_path, arms, 2, epochs=20)), "steps")
    ends = [curve.low[-1] for curve in plot.curves]
    assert plot.bottom is None or plot.bottom < min(ends)


def plot_rates(folder, arms):
    study = read_study(fake_comparison(folder, {arm: {} for arm in arms}, 1, epochs=1))
    return next(p for p in plot_metrics(study, "steps") if p.title == "Learning rate")


def test_arms_with_the_same_learning_rates_are_named(tmp_path):
    shared = plot_rates(tmp_path / "a", ["a=sgd:lr=0.2", "b=sgd:lr=0.1", "c=adam:lr=0.2"])
    assert shared.caption == "a and c have the same curve."
    everyone = plot_rates(tmp_path / "b", ["a=sgd:lr=0.2", "b=sgd:lr=0.2", "c=adam:lr=0.2"])
    assert everyone.caption == "All arms have the same curve."
    assert plot_rates(tmp_path / "c", ["sgd:lr=0.1", "sgd:lr=0.2"]).caption == ""


def test_an_axis_of_learning_rates_ends_where_they_end(tmp_path):
    plot = plot_rates(tmp_path, ["sgd:lr=0.2", "sgd:lr=0.01"])
    assert plot.log_y
    assert (plot.bottom, plot.caption) == (None, "")


def test_sensitivity_marks_choice_and_divergence(tmp_path):
    folder = fake_sweep(tmp_path, {"sgd": [0.1, 0.4, 1.6]}, {"sgd": 0.4}, wild=1.0)
    plot = plot_sensitivity(read_study(folder).sensitivities, held_out=True)
    assert plot.curves[0].x == (0.1, 0.4)
    assert [(point.part, point.x) for point in plot.points] == [("diverged", 1.6), ("chosen", 0.4)]
    assert plot.curves[0].has_band
    assert [part for _, part in drawn_parts(plot)] == ["spread", "mean", "diverged", "chosen"]


@pytest.mark.parametrize(("metric", "end"), [(ACCURACY, "bottom"), (LOSS, "top")])
def test_a_run_that_diverged_is_at_the_bad_end(tmp_path, metric, end):
    folder = fake_sweep(tmp_path, {"sgd": [0.1, 0.4, 1.6]}, {"sgd": 0.4}, wild=1.0)
    found = [replace(each, metric=metric) for each in read_study(folder).sensitivities]
    plot = plot_sensitivity(found, held_out=True)
    assert f"×\u00a0at the {end}: a run diverged" in plot.caption
    assert plot.low_is_good == (end == "top")
    heights = {  # counted from the top
        part: float(next(e.get("y") for e in element.iter() if e.get("y")))
        for element in fromstring(draw(plot).svg).iter()
        if (part := element.get("data-part")) in ("diverged", "chosen")
    }
    assert (heights["diverged"] < heights["chosen"]) == (end == "top")


def test_a_single_learning_rate_next_to_one_that_diverged_draws_without_a_warning(tmp_path):
    """pytest turns warnings into errors."""
    arms = {"sgd:lr=0.1": {}, "sgd:lr=1e30": {"diverged": 3}}
    plot = plot_sensitivity(read_study(fake_comparison(tmp_path, arms, 2)).sensitivities, False)
    assert [curve.x for curve in plot.curves] == [(0.1,)]
    draw(plot)


def test_equal_records_make_equal_pictures(tmp_path):
    study = read_study(fake_comparison(tmp_path, {"neumann": {}, "sgd": {}}, 2, epochs=2))
    plot = plot_score(study, "steps")
    assert draw(plot) == draw(plot)


def test_a_png_is_opaque(tmp_path):
    """Dark text on a transparent background could not be read in a dark viewer."""
    study = read_study(fake_comparison(tmp_path, {"sgd": {}}, 1, epochs=1))
    png = Image.open(io.BytesIO(draw(plot_score(study, "steps")).png))
    assert png.convert("RGBA").getpixel((0, 0)) == (255, 255, 255, 255)


def test_text_in_pictures_is_neither_markup_nor_mathematics(tmp_path):
    study = read_study(fake_comparison(tmp_path, {name: {} for name in HOSTILE}, 1, epochs=1))
    parts = drawn_parts(plot_score(study, "steps"))
    assert [curve for curve, part in parts if part == "mean"] == list(HOSTILE)


def test_twelve_arms_look_different():
    assert len({line_style(index) for index in range(12)}) == 12
    assert len({line_style(index) for index in range(60)}) == 60
