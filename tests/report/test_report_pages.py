"""Pages of every kind of folder, awkward ones included; text stays text."""

import re
import sys
from html.parser import HTMLParser
from xml.etree.ElementTree import Element

import pytest
from fake_records import fake_comparison, fake_run, fake_sweep

from neumann.lab.compare import compare
from neumann.lab.errors import UsageError
from neumann.lab.studies import CompareConfig
from neumann.report import drawing, write_report
from neumann.report.forces import force_plots
from neumann.report.markup import breakable, document, tag
from neumann.report.metrics import metric_plots, recalibration_plot
from neumann.report.palette import style_of
from neumann.report.plots import guide
from neumann.report.studies import read_study
from neumann.report.tried import sensitivity_plot

LONG = "neumann:warmup_epochs=1,reset_epochs=2,momentum=0.85,cubic=1e-6,bounded=false"
HOSTILE = ("<script>window.hacked=1</script>", '"><img src=x onerror="hacked=1">', "$\\frac{a$ _b")


class Reader(HTMLParser):
    """Text, ids, plots and whatever could run or load."""

    def __init__(self):
        super().__init__()
        self.text, self.tags, self.ids, self.plots, self.active = "", [], [], [], []

    def handle_starttag(self, name, attributes):
        given = dict(attributes)
        self.tags.append(name)
        self.ids += [given["id"]] if "id" in given else []
        self.plots += [given["data-plot"]] if "data-plot" in given else []
        self.active += [(name, key) for key in given if key.startswith("on") or key == "src"]
        self.active += [(name, "")] if name in ("script", "iframe", "object", "embed") else []

    def handle_data(self, data):
        self.text += data


def read_page(path):
    reader = Reader()
    reader.feed(path.read_text())
    return reader


@pytest.fixture
def quick(monkeypatch):
    """Pages without pictures: what they draw is tested apart."""

    def draw(plot):
        return drawing.Picture(Element("svg"), b"png")

    monkeypatch.setattr(drawing, "draw", draw)


METRICS = {
    f"{name}-{axis}"
    for name in ("accuracy", "loss", "train-loss", "learning-rate")
    for axis in ("epochs", "steps", "seconds")
}


def test_a_comparison_that_was_trained(tmp_path):
    """The one report that is made from trainings."""
    config = CompareConfig(
        arms=("neumann:warmup_epochs=1", "sgd", "sgd:lr=1e30"), seeds=2, epochs=2, target=50.0
    )
    compare(config, tmp_path)
    path = write_report(tmp_path)
    page = read_page(path)
    assert path == tmp_path / "report.html"
    assert set(page.plots) == METRICS | {"distance", "forces", "lr-sensitivity"}
    assert {png.stem for png in (tmp_path / "plots").iterdir()} == set(page.plots)
    for png in (tmp_path / "plots").iterdir():
        assert png.read_bytes().startswith(b"\x89PNG")
    assert len(page.ids) == len(set(page.ids))
    assert "sgd:lr=1e30 diverged in 2 of 2 runs" in page.text
    assert "steps to 50 %" in page.text
    assert path.stat().st_size < 1_000_000


def test_equal_records_make_equal_pictures(tmp_path):
    study = read_study(fake_comparison(tmp_path, {"neumann": {}, "sgd": {}}, 2, epochs=2))
    plot = metric_plots(study, "steps")[0]
    first, second = drawing.draw(plot), drawing.draw(plot)
    assert document(first.svg) == document(second.svg)
    assert first.png == second.png


def test_a_run(tmp_path, quick):
    page = read_page(write_report(fake_run(tmp_path, "neumann", data="text:a/b.txt", model="gpt")))
    assert set(page.plots) == METRICS | {"distance", "forces"}
    assert "neumann on text:a/b.txt" in page.text
    assert "hardware.cpu_count" in page.text


def test_a_run_that_has_only_begun(tmp_path, quick):
    page = read_page(write_report(fake_run(tmp_path, ended=0)))
    assert page.plots == []
    assert "Unfinished: 0 of 6 epochs" in page.text


def test_a_sweep(tmp_path, quick):
    rates = [0.1, 0.4, 0.8]
    folder = fake_sweep(tmp_path, {"neumann": rates, "sgd": rates}, {"neumann": 0.4, "sgd": 0.4})
    page = read_page(write_report(folder))
    assert set(page.plots) == METRICS | {"distance", "forces", "lr-sensitivity"}
    assert "Learning rates of neumann and sgd on digits" in page.text
    assert "chosen" in page.text


def test_an_unfinished_sweep(tmp_path, quick):
    page = read_page(write_report(fake_sweep(tmp_path, {"sgd": [0.1, 0.4]}, None)))
    assert page.plots == ["lr-sensitivity"]


@pytest.mark.parametrize(
    ("arms", "seeds", "common"),
    [
        ({"sgd": {}, "adam": {}}, 1, {"epochs": 1}),
        ({"neumann": {"diverged": 2}, "sgd": {"diverged": 60}}, 3, {}),
        ({f"sgd:momentum=0.{i}": {} for i in range(12)}, 10, {"epochs": 2, "log_every": 20}),
        ({LONG: {}, LONG + ",average=0.9": {"only": 1}}, 2, {"batchnorm": True}),
        ({"neumann": {"only": 0}, "sgd": {"only": 0}}, 2, {}),
    ],
    ids=["single", "diverged", "many", "long", "nothing"],
)
def test_awkward_comparisons(tmp_path, quick, arms, seeds, common):
    folder = fake_comparison(tmp_path, arms, seeds, target=97.5, **common)
    page = read_page(write_report(folder))
    assert all(arm in page.text for arm in arms)
    assert page.active == []
    # "nan" and "inf" are no words of ours.
    assert not re.search(r"\b(nan|inf)\b", page.text)


def test_seeds_and_differences_of_settings(tmp_path, quick):
    folder = fake_comparison(tmp_path, {"sgd": {}, "adam": {"smoothing": 0.1}}, 2)
    html = write_report(folder).read_text()
    assert "<mark>0.1</mark>" in html
    assert "<mark>adam</mark>" in html
    assert "seed 1" in html
    assert "Settings that all arms share" in html


def test_environments_that_differ_are_named(tmp_path, quick):
    folder = fake_comparison(tmp_path, {"sgd": {}}, 2)
    config = folder / "sgd" / "seed-1" / "config.json"
    config.write_text(config.read_text().replace('"torch": "', '"torch": "9.'))
    page = read_page(write_report(folder))
    assert "not all made in the same environment: versions.torch differs" in page.text


def test_hostile_text_stays_text(tmp_path, quick):
    arms = {
        name: {"data": "</style><script>x</script>", "model": "a\x00\ud800b"} for name in HOSTILE
    }
    path = write_report(fake_comparison(tmp_path / "<i>x</i>", arms, 2))
    page = read_page(path)
    assert all(name in page.text for name in HOSTILE)
    assert page.active == []
    assert "img" not in page.tags
    assert "i" not in page.tags
    assert page.tags.count("style") == 1
    assert "a\ufffd\ufffdb" in page.text


def test_text_in_pictures_is_neither_markup_nor_mathematics(tmp_path):
    study = read_study(fake_comparison(tmp_path, {name: {} for name in HOSTILE}, 1, epochs=1))
    picture = drawing.draw(metric_plots(study, "steps")[0])
    found = [e.get("data-curve") for e in picture.svg.iter() if e.get("data-part") == "mean"]
    assert found == list(HOSTILE)


def test_markup_escapes_wherever_text_goes():
    made = tag("p", "a<b", tag("i", "&"), None, "c>", title='"<', data_x=None)
    assert document(made) == (b'<!DOCTYPE html>\n<p title="&quot;<">a&lt;b<i>&amp;</i>c&gt;</p>\n')
    assert (
        "".join(p if isinstance(p, str) else "|" for p in breakable("a:b=1,c_d")) == "a:|b=1,|c_|d"
    )


def test_missing_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "neumann.report.drawing")
    monkeypatch.delattr("neumann.report.drawing", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"matplotlib.*neumann-optimizer\[lab\]"):
        write_report(fake_run(tmp_path))
    assert not (tmp_path / "report.html").exists()


def test_a_folder_that_cannot_be_written(tmp_path, quick):
    folder = fake_run(tmp_path, epochs=1)
    (folder / "plots").write_text("in the way")
    with pytest.raises(UsageError, match="cannot write the report"):
        write_report(folder)


def test_forces_leave_zeros_out(tmp_path):
    study = read_study(fake_comparison(tmp_path, {"neumann:warmup_epochs=1": {}, "sgd": {}}, 2))
    distance, forces = force_plots(study)
    assert {curve.label for curve in distance.curves} == {"neumann:warmup_epochs=1"}
    assert [curve.part for curve in forces.curves] == ["repulsive force", "attractive force"]
    assert all(value != 0 for curve in forces.curves for value in curve.y)
    assert distance.marks[0].resets == (21 / 20,)
    assert drawing.draw(forces).png


def test_the_guide_says_what_marks_mean(tmp_path):
    def said(arm, **options):
        folder = tmp_path / arm.replace(":", "_")
        return guide(metric_plots(read_study(fake_run(folder, arm, **options)), "seconds"))

    often = "neumann:warmup_epochs=0,reset_epochs=0.05,reset_growth=1"
    assert said("sgd") == ""
    both = "neumann:warmup_epochs=1"
    assert said(both) == f"Shaded: the warm-up of {both}; dotted: its resets."
    assert said("neumann", ended=2) == "Shaded: the warm-up of neumann."
    assert said("neumann:warmup_epochs=0") == "Dotted: the resets of neumann:warmup_epochs=0."
    assert said(often) == f"The 120 resets of {often} are too many to be marked."


def test_recalibrated_accuracy_stands_beside_the_plain(tmp_path):
    study = read_study(fake_comparison(tmp_path / "a", {"sgd": {}}, 2, batchnorm=True))
    plot = recalibration_plot(study)
    assert [curve.part for curve in plot.curves] == ["plain", "recalibrated"]
    assert plot.curves[1].y[-1] == pytest.approx(plot.curves[0].y[-1] + 0.6)
    assert recalibration_plot(read_study(fake_comparison(tmp_path / "b", {"sgd": {}}))) is None


def test_sensitivity_marks_choice_and_divergence(tmp_path):
    folder = fake_sweep(tmp_path, {"sgd": [0.1, 0.4, 1.6]}, {"sgd": 0.4}, wild=1.0)
    plot = sensitivity_plot(read_study(folder).sensitivities, held_out=True)
    assert plot.curves[0].x == (0.1, 0.4)
    assert [(spot.part, spot.x) for spot in plot.spots] == [("diverged", 1.6), ("chosen", 0.4)]
    assert plot.curves[0].spread
    parts = [element.get("data-part") for element in drawing.draw(plot).svg.iter()]
    assert [part for part in parts if part] == ["spread", "mean", "diverged", "chosen"]


def test_a_single_learning_rate_beside_one_that_diverged_draws_without_a_warning(tmp_path):
    """pytest makes errors of warnings."""
    arms = {"sgd:lr=0.1": {}, "sgd:lr=1e30": {"diverged": 3}}
    plot = sensitivity_plot(read_study(fake_comparison(tmp_path, arms, 2)).sensitivities, False)
    assert [curve.x for curve in plot.curves] == [(0.1,)]
    drawing.draw(plot)


def test_several_tests_are_said_not_to_be_corrected(tmp_path, quick):
    note = "The p values are not corrected for multiple comparisons."
    arms = {"neumann": {}, "sgd": {}, "adam": {}}
    assert note in read_page(write_report(fake_comparison(tmp_path / "a", arms))).text
    del arms["adam"]
    assert note not in read_page(write_report(fake_comparison(tmp_path / "b", arms))).text


def test_twelve_arms_look_different():
    assert len({style_of(place) for place in range(12)}) == 12
    assert len({style_of(place) for place in range(60)}) == 60
