"""Pages of every kind of folder, awkward ones included; text never becomes markup."""

import json
import re
import sys
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from neumann.lab.errors import UsageError
from neumann.lab.report import write_report
from neumann.lab.report.page import breakable, highlight, unbroken
from neumann.lab.report.result_tables import tabulate_settings
from neumann.lab.report.study_records import read_study
from neumann.lab.storage.reading import read_summary
from neumann.lab.studies.comparison import run_comparison
from neumann.lab.studies.results import read_comparison
from neumann.lab.studies.settings import CompareConfig
from tests.lab.report.test_training_plots import HOSTILE
from tests.support.fake_records import fake_comparison, fake_run, fake_study, fake_sweep

pytestmark = pytest.mark.slow

LONG = "neumann:warmup_epochs=1,reset_epochs=2,momentum=0.85,cubic=1e-6,bounded=false"


class Reader(HTMLParser):
    """Collects text, ids, plots and everything that could run or load."""

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
        self.text += data.replace("\u00a0", " ")


def read_page(path):
    reader = Reader()
    reader.feed(path.read_text())
    return reader


METRICS = {
    f"{name}-{axis}"
    for name in ("accuracy", "loss", "train-loss", "learning-rate")
    for axis in ("epochs", "steps", "seconds")
}


@pytest.mark.slow
def test_a_comparison_that_was_trained(tmp_path):
    """The one report made from real runs."""
    config = CompareConfig(
        arms=("neumann:warmup_epochs=1", "sgd", "sgd:lr=1e30"), seeds=2, epochs=2, target=50.0
    )
    run_comparison(config, tmp_path)
    path = write_report(tmp_path)
    page = read_page(path)
    assert path == tmp_path / "report.html"
    assert set(page.plots) == METRICS | {"result", "distance", "forces", "lr-sensitivity"}
    assert {png.stem for png in (tmp_path / "plots").iterdir()} == set(page.plots)
    for png in (tmp_path / "plots").iterdir():
        assert png.read_bytes().startswith(b"\x89PNG")
    assert len(page.ids) == len(set(page.ids))
    assert "sgd (lr 1e30) diverged in 2 of 2 runs" in page.text
    assert "steps to 50 %" in page.text
    assert "top-5, %" in page.text
    assert "Shaded: the warm-up of neumann; dotted: its resets." in page.text
    assert "Older records" not in page.text
    assert path.stat().st_size < 1_000_000


def test_a_run(tmp_path, quick):
    page = read_page(write_report(fake_run(tmp_path, "neumann", data="folder:a/b")))
    assert set(page.plots) == METRICS | {"distance", "forces"}
    assert "neumann on folder:a/b" in page.text
    assert "hardware.cpu_count" in page.text


def test_a_run_on_text(tmp_path, quick):
    folder = fake_run(tmp_path, "sgd", data="text:a/b.txt", model="gpt", target=0.5)
    page = read_page(write_report(folder))
    assert set(page.plots) == {name.replace("accuracy", "bits-per-byte") for name in METRICS}
    assert "sgd on text:a/b.txt" in page.text
    summary = read_summary(folder)
    assert f"A loss of {summary['loss']:.4f} nats per token (perplexity " in page.text
    assert f"{summary['bits_per_byte']:.4f} bits per byte) after 120 steps" in page.text
    assert "0.5 nats per token was reached after 40 steps" in page.text
    assert "training loss of the last epoch, nats per token" in page.text
    assert page.text.count("loss, nats per token") == page.text.count("loss, nats")
    assert "accuracy" not in page.text.lower()


def test_a_comparison_on_text(tmp_path, quick):
    text = {"data": "text:a.txt", "tokens": "bpe:300"}
    folder = fake_comparison(tmp_path, {"sgd": {}, "adam": {}}, 3, target=0.3, **text)
    page = read_page(write_report(folder))
    for words in (
        "loss, nats per token",
        "perplexity",
        "bits per byte",
        "steps to 0.3 nats per token",
        "nats, paired, 95 % CI",
        "Loss of each seed, nats per token",
    ):
        assert words in page.text
    comparison = read_comparison(folder)
    first, second = comparison.rows
    # The arm with the lower loss is ahead.
    assert first.score.mean < second.score.mean
    assert second.difference.mean == pytest.approx(second.score.mean - first.score.mean)
    (verdict,) = comparison.state_verdicts()
    assert verdict[1:] in page.text  # a page starts it with a capital
    assert " nats (n = 3" in verdict
    assert "accuracy" not in page.text.lower()


def test_text_from_before_tokens_was_a_setting_keeps_its_accuracy(tmp_path, quick):
    folder = fake_run(tmp_path, "sgd", data="text:a.txt", target=50.0)
    config = json.loads((folder / "config.json").read_text())
    del config["config"]["tokens"]
    (folder / "config.json").write_text(json.dumps(config))
    page = read_page(write_report(folder))
    assert set(page.plots) == METRICS
    assert "% accuracy after 120 steps" in page.text
    assert "50 % was reached" in page.text


def test_a_run_that_has_only_started(tmp_path, quick):
    page = read_page(write_report(fake_run(tmp_path, "neumann", ended=0)))
    assert page.plots == []
    assert "Unfinished: 0 of 6 epochs" in page.text


def test_a_run_recorded_before_runs_had_timetables(tmp_path, quick):
    folder = fake_run(tmp_path, "neumann:warmup_epochs=1", timetable=False)
    page = read_page(write_report(folder))
    assert set(page.plots) == METRICS | {"distance", "forces"}
    assert "Shaded: the warm-up of neumann;" in page.text


def test_a_sweep(tmp_path, quick):
    rates = [0.1, 0.4, 0.8]
    folder = fake_sweep(tmp_path, {"neumann": rates, "sgd": rates}, {"neumann": 0.4, "sgd": 0.4})
    page = read_page(write_report(folder))
    assert set(page.plots) == METRICS | {"result", "distance", "forces", "lr-sensitivity"}
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
    # A number that is missing must not show as one of these.
    assert not re.search(r"\b(nan|inf)\b", page.text)


def test_seeds_and_differences_of_settings(tmp_path, quick):
    folder = fake_comparison(tmp_path, {"sgd": {}, "adam": {"smoothing": 0.1}}, 2)
    html = write_report(folder).read_text()
    assert "<mark>0.1</mark>" in html
    assert "<mark>adam</mark>" in html
    assert "seed 1" in html
    assert "Settings that all arms share" in html


def test_settings_show_the_weight_decay_that_an_arm_names(tmp_path, quick):
    arms = {"neumann-spectral:weight_decay=auto": {}, "sgd": {}, "adamw:weight_decay=0.25": {}}
    html = write_report(fake_comparison(tmp_path / "a", arms, 1)).read_text()
    differences = html.partition("Where the arms differ")[2].partition("</table>")[0]
    cells = re.findall(r">([^<>\s]+)<", differences.partition("<tbody>")[2])
    columns = dict(zip(("neumann-spectral", "sgd", "adamw"), ("auto", "0", "0.25"), strict=True))
    for arm, decay in columns.items():
        assert cells[cells.index(arm) + 2] == decay  # after the optimizer
    page = read_page(write_report(fake_run(tmp_path / "b", "neumann-spectral:weight_decay=auto")))
    assert re.search(r"weight_decay\s+auto\s", page.text)


def test_settings_show_the_options_of_the_optimizer(tmp_path, quick):
    arms = ["fast=neumann-spectral:momentum=0.8", "muon:betas=(0.9,0.95)", "sgd:momentum=0.5"]
    common = {"lr": 0.1, "weight_decay": 0.0}
    folder = fake_comparison(tmp_path, {arm: {} for arm in arms}, 1, epochs=1, **common)
    table = tabulate_settings(read_study(folder)).differences
    assert [cell.text for cell in table.titles] == ["arm", "opt", "momentum", "betas"]
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["fast", "neumann-spectral", "0.8", "not set"],
        ["muon", "muon", "not set", "(0.9, 0.95)"],
        ["sgd", "sgd", "0.5", "not set"],
    ]
    assert [cell.style for cell in table.rows[2]] == ["", "different", "different", ""]


def test_different_environments_are_pointed_out(tmp_path, quick):
    folder = fake_comparison(tmp_path, {"sgd": {}}, 2)
    config = folder / "sgd" / "seed-1" / "config.json"
    config.write_text(config.read_text().replace('"torch": "', '"torch": "9.'))
    page = read_page(write_report(folder))
    assert "Not all runs had the same environment: versions.torch differs" in page.text


def test_text_from_records_never_becomes_markup(tmp_path, quick):
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


def test_templates_never_switch_escaping_off():
    templates = files("neumann.lab.report") / "templates"
    for template in templates.iterdir():
        assert not re.search(r"\|\s*safe|autoescape", template.read_text(encoding="utf-8"))


def test_filters_escape_what_they_are_given():
    assert breakable("a:<b>=1,c_d") == "a:<wbr>&lt;b&gt;=1,<wbr>c_d"
    assert breakable("text://x") == "text://<wbr>x"
    assert breakable("a-<b>:c") == '<span class="whole">a-&lt;b&gt;:</span><wbr>c'
    assert unbroken("<i> a-b,  c") == '&lt;i&gt; <span class="whole">a-b,</span>  c'
    assert unbroken("a-" * 13) == "a-" * 13
    marked = "<b>a:<wbr>&lt;i&gt;</b> beats <b>a</b> by &lt;2&gt;."
    assert highlight("a:<i> beats a by <2>.", {"a", "a:<i>"}) == marked
    assert highlight("a < b", set()) == "a &lt; b"
    assert highlight("between a and b: 1", {"a", "b"}) == "between <b>a</b> and <b>b</b>: 1"


@pytest.mark.parametrize(("package", "module"), [("matplotlib", "drawing"), ("jinja2", "page")])
def test_a_missing_package_is_an_error_that_names_the_extra(tmp_path, monkeypatch, package, module):
    monkeypatch.delitem(sys.modules, f"neumann.lab.report.{module}")
    monkeypatch.delattr(f"neumann.lab.report.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"{package}.*\[lab\]"):
        write_report(fake_run(tmp_path))
    assert not (tmp_path / "report.html").exists()


def test_a_folder_that_cannot_be_written(tmp_path, quick):
    folder = fake_run(tmp_path, epochs=1)
    (folder / "plots").write_text("a file with the name of the folder")
    with pytest.raises(UsageError, match="cannot write the report"):
        write_report(folder)


def test_several_p_values_come_with_a_note(tmp_path, quick):
    note = "The p values are corrected for multiple comparisons by Holm's method;"
    arms = {"neumann": {}, "sgd": {}, "adam": {}}
    assert note in read_page(write_report(fake_comparison(tmp_path / "a", arms))).text
    del arms["adam"]
    page = read_page(write_report(fake_comparison(tmp_path / "b", arms)))
    assert note not in page.text
    assert "top-5" not in page.text  # of runs that did not record it


def test_so_do_those_with_another_reference_than_the_first(tmp_path, quick):
    """The first has diverged, so it has no p values."""
    arms = {"neumann": {"diverged_seeds": (0, 1, 2)}, "sgd": {}, "adam": {}, "adamw": {}}
    page = read_page(write_report(fake_comparison(tmp_path, arms)))
    assert "The p values are corrected for multiple comparisons by Holm's method;" in page.text


def test_a_page_has_one_kind_of_apostrophe(tmp_path, quick):
    arms = {"neumann:warmup_epochs=1": {}, "neumann:warmup_epochs=2": {}, "sgd": {}}
    html = write_report(fake_comparison(tmp_path, arms, spectrum=20)).read_text()
    for words in ("by Student&#39;s t", "Holm&#39;s method", "the arm&#39;s color", "paper&#39;s"):
        assert words in html
    assert "’" not in html


@pytest.mark.parametrize("count", [2, 3])
def test_several_p_values_at_a_point_come_with_a_note(tmp_path, quick, count):
    arms = dict([("neumann", {}), ("sgd", {}), ("adam", {})][:count])
    names = ["batch_size=64", "batch_size=1024"]
    page = read_page(write_report(fake_study(tmp_path / "x", arms, names)))
    note = "At each point, p values are corrected for multiple comparisons by Holm's method;"
    assert (note in page.text) == (count == 3)
