"""The chart of the result: what it shows, what lies beyond its axis, and its picture."""

import shutil

import pytest

from neumann.lab.report.result_chart import chart_result
from neumann.lab.report.result_picture import draw_result
from neumann.lab.report.study_records import read_study
from tests.support.fake_records import fake_comparison, fake_run, fake_sweep


def read_chart(folder, arms, seeds=3, **options):
    return chart_result(read_study(fake_comparison(folder, arms, seeds, epochs=2, **options)))


def test_a_row_for_each_arm(tmp_path):
    chart = read_chart(tmp_path, {"neumann": {}, "sgd": {}, "adam": {"diverged_seeds": (0,)}})
    assert chart.title == "Accuracy on the test set, %"
    assert [row.arm for row in chart.rows] == ["neumann", "sgd", "adam"]
    for row in chart.rows:
        low, high = row.interval
        assert 0 <= low < row.mean < high <= 100
    assert [row.beyond for row in chart.rows] == [(), (), ()]
    assert [len(row.seeds) for row in chart.rows] == [3, 3, 2]
    assert [row.note for row in chart.rows] == ["", "", "1 diverged"]
    places = [place for place, _ in chart.ticks]
    assert 2 <= len(places) <= 7
    assert places == sorted(places)
    assert 0 <= places[0] < places[-1] <= 100


@pytest.mark.parametrize("data", ["digits", "text:a.txt"], ids=["accuracy", "loss"])
def test_a_bad_arm_does_not_squeeze_the_others(tmp_path, data):
    arms = {"sgd": {}, "adam": {}, "adamw": {"best": 30.0}}
    options = {} if data == "digits" else {"tokens": "bpe:300"}
    chart = read_chart(tmp_path, arms, data=data, **options)
    good, fair, bad = chart.rows
    assert good.mean is not None
    assert abs(good.mean - fair.mean) > 5
    assert bad.mean is None
    assert bad.beyond == (("left",) if data == "digits" else ("right",))
    assert "±" in bad.text
    assert bad.far == bad.text.partition(" ")[0]
    assert good.far == fair.far == ""
    assert chart.caption.endswith("The axis is cut: an arrow points to what lies outside.")
    assert ("lower is better" in chart.title) == (data != "digits")


def test_an_arm_that_is_only_behind_is_not_cut_off(tmp_path):
    """Twelve points behind others that span two: their points can still be told apart."""
    arms = {"sgd": {}, "adam": {}, "adamw": {"best": 96.6}, "nadam": {"best": 85.0}}
    chart = read_chart(tmp_path, arms)
    assert all(row.mean is not None and not row.beyond and not row.far for row in chart.rows)
    assert "axis is cut" not in chart.caption
    assert chart.rows[0].mean - chart.rows[1].mean > 2


def test_a_cut_axis_keeps_what_is_near(tmp_path):
    """One arm is far off, another only behind: the axis ends below the latter."""
    arms = {"sgd": {}, "adam": {}, "adamw": {"best": 85.0}, "nadam": {"best": 40.0}}
    *near, far = read_chart(tmp_path, arms).rows
    assert all(row.mean is not None and not row.beyond for row in near)
    assert (far.mean, far.beyond) == (None, ("left",))


def test_two_arms_are_both_shown(tmp_path):
    chart = read_chart(tmp_path, {"sgd": {}, "adamw": {"best": 30.0}})
    assert all(row.mean is not None and not row.beyond for row in chart.rows)


def test_equal_seeds_do_not_hide_each_other(tmp_path):
    folder = fake_comparison(tmp_path, {"sgd": {}, "adam": {"best": 90.0}}, 2, epochs=1)
    for name in ("summary.json", "metrics.jsonl"):
        shutil.copy(folder / "sgd" / "seed-0" / name, folder / "sgd" / "seed-1" / name)
    chart = chart_result(read_study(folder))
    assert [seed.level for seed in chart.rows[0].seeds] == [0, 1]


def test_one_seed_has_no_interval(tmp_path):
    chart = read_chart(tmp_path, {"sgd": {}, "adam": {"diverged": 5}}, 1)
    assert [row.interval for row in chart.rows] == [None, None]
    assert [row.text for row in chart.rows][1] == "diverged"
    assert "there are no intervals" in chart.caption


def test_without_results_there_is_no_chart(tmp_path):
    assert chart_result(read_study(fake_run(tmp_path / "run", epochs=1))) is None
    assert read_chart(tmp_path / "c", {"sgd": {"only": 0}}) is None
    assert read_chart(tmp_path / "d", {"sgd": {"diverged": 5}}) is None
    assert chart_result(read_study(fake_sweep(tmp_path / "s", {"sgd": [0.1]}, None))) is None


def test_the_same_chart_as_a_picture(tmp_path):
    arms = {"_sgd=sgd": {}, "$a_b$": {"diverged": 5}, "x" * 99: {}, "adam": {"best": 30.0}}
    png = draw_result(read_chart(tmp_path, arms))
    assert png.startswith(b"\x89PNG")
    assert len(png) > 10_000
