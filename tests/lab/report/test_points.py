"""The page of a study with axes: tables and plots of all points, finished or not."""

import json

import pytest

from neumann.lab.report import write_report
from neumann.lab.report.points import has_points, plot_points, read_overview, tabulate_points
from neumann.lab.storage.reading import RecordsError
from tests.support.fake_records import fake_study, fake_sweep

ARMS = {"neumann=neumann:lr=0.2": {}, "base=sgd:lr=0.4": {}}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    names = ["batch_size=64", "batch_size=1024", "batch_size=4096"]
    return fake_study(tmp_path_factory.mktemp("study") / "x", ARMS, names)


def test_tables_have_a_column_for_each_point(study):
    overview = read_overview(study)
    assert overview.arms == ["neumann", "base"]
    scores, ahead = tabulate_points(overview)
    assert [cell.text for cell in scores.titles[1:]] == [
        "batch size 64",
        "batch size 1024",
        "batch size 4096",
    ]
    assert [row[0].text for row in scores.rows] == ["neumann", "base"]
    assert "±" in scores.rows[0][1].text
    assert scores.rows[0][3].text == "–"
    assert [row[0].text for row in ahead.rows] == ["neumann", "base"]
    with_first, with_second = ahead.rows[1][1].choices
    assert with_first.text.startswith("+")
    assert with_first.note.endswith("n 3")
    assert with_second.note == "reference"
    # The other way round it is the same number.
    opposite = ahead.rows[0][1].choices[1]
    assert opposite.text == with_first.text.replace("+", "−")
    assert opposite.note == with_first.note


def test_a_learning_rate_that_was_chosen_for_another_arm_has_a_note(tmp_path):
    names = ["batch_size=64", "batch_size=128"]
    folder = fake_study(tmp_path / "x", {"sgd": {}}, names)
    taker = "sgd:momentum=0.5,lr=sgd"
    fake_sweep(folder / names[1], {"sgd": [0.1, 0.4], taker: []}, {"sgd": 0.4, taker: 0.4})
    rates = tabulate_points(read_overview(folder))[-1]
    assert rates.label == "Learning rates chosen on held-out data"
    found = {row[0].text: (row[2].text, row[2].note) for row in rates.rows}
    assert found == {"sgd": ("0.4", ""), "sgd (momentum 0.5)": ("0.4", "the rate of sgd")}


def test_scores_are_plotted_along_an_axis_of_numbers(study):
    (plot,) = plot_points(read_overview(study))
    assert plot.title == "Accuracy, % by batch size"
    assert plot.log_x
    assert [curve.label for curve in plot.curves] == ["neumann", "base"]
    assert plot.curves[0].x == (64.0, 1024.0)
    assert plot.curves[0].low[0] < plot.curves[0].y[0] < plot.curves[0].high[0]


def test_each_value_of_another_axis_has_a_plot(tmp_path):
    names = [f"batch_size={b},epochs={e}" for b in (64, 128) for e in (2, 4)]
    axes = {"batch_size": [64, 128], "epochs": [2, 4]}
    plots = plot_points(read_overview(fake_study(tmp_path / "x", ARMS, names, axes)))
    assert [plot.title.partition(" by ")[2] for plot in plots] == [
        "batch size, epochs 2",
        "batch size, epochs 4",
        "epochs, batch size 64",
        "epochs, batch size 128",
    ]
    assert len({plot.name for plot in plots}) == 4


@pytest.mark.usefixtures("quick")
def test_page_links_to_the_page_of_each_point(study):
    page = write_report(study).read_text()
    assert "<title>Batches</title>" in page
    assert "A &amp; B." in page
    assert 'href="batch_size=64/report.html"' in page
    assert 'href="batch_size=4096/report.html"' not in page
    assert "Not started." in page
    inner = (study / "batch_size=64" / "report.html").read_text()
    assert "<title>Batches: batch size 64</title>" in inner


@pytest.mark.parametrize("name", ["../other", "/tmp", ".git", "a/b"])
def test_points_outside_the_folder_are_refused(name, tmp_path):
    content = {"title": "", "about": "", "axes": {"epochs": [1]}}
    content["points"] = [{"folder": name, "values": {"epochs": 1}}]
    (tmp_path / "study.json").write_text(json.dumps(content))
    with pytest.raises(RecordsError, match="is not the folder of a point"):
        has_points(tmp_path)
