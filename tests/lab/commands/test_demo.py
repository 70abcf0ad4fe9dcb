"""The demo compares five arms, tuned on held-out images by the search whose files we publish."""

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest
import torch

from benchmarks.contest.demo_rates import choose_variants
from neumann.lab.commands import demo
from neumann.lab.commands.demo import ARMS, DemoConfig
from neumann.lab.commands.main import main
from neumann.lab.contenders import Contender
from neumann.lab.metrics import ACCURACY
from neumann.lab.studies.results import ArmResult, Comparison, FinishedRun
from neumann.lab.studies.statistics import mean_interval

ROOT = Path(__file__).parents[3]
NAMES = {  # in the search, by those in the demo
    "Neumann spectral": "spectral",
    "Muon": "Muon",
    "AdamW": "AdamW",
    "Nesterov SGD": "Nesterov SGD",
    "Neumann (paper)": "paper's form",
}


@pytest.fixture
def threads():
    """Restore the number of threads, which the demo sets to 1."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def rates():
    return json.loads((ROOT / "results/demo-rates.json").read_text())


@pytest.fixture(scope="module")
def study():
    return tomllib.loads((ROOT / "studies/demo.toml").read_text())


def test_arms_are_those_that_the_search_chose(rates):
    chosen = choose_variants(rates["arms"])
    assert chosen == rates["chosen"]
    assert list(chosen) == list(NAMES.values())
    for name, text in ARMS.items():
        found = Contender.parse(rates["arms"][chosen[NAMES[name]]]["arm"])
        assert Contender.parse(text) == dataclasses.replace(found, label="")


def test_every_rate_is_the_best_of_seven_and_not_at_an_end(rates):
    for name, arm in rates["arms"].items():
        scores = dict(zip(arm["lrs"], arm["accuracy"], strict=True))
        assert len(scores) == 7, name
        assert scores[arm["lr"]] == max(scores.values()), name
        assert arm["lr"] in arm["lrs"][1:-1], name


def test_the_published_search_is_that_of_the_study(rates, study):
    assert rates["study"] == "studies/demo.toml"
    assert list(rates["arms"]) == list(study["arms"])
    for name, table in study["arms"].items():
        low, high, count = table["lr"].split(":")
        lrs = rates["arms"][name]["lrs"]
        assert (lrs[0], lrs[-1], len(lrs)) == (float(low), float(high), int(count))


def test_the_demo_trains_as_the_search_did(study):
    config = DemoConfig().make_comparison()
    config.check()
    assert {key: getattr(config, key) for key in study["settings"]} == study["settings"]
    assert (config.seeds, config.held_out) == (5, False)
    batches = 1437 // config.batch_size
    assert config.epochs * batches == demo.STEPS


def test_default_folder_is_new_each_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(DemoConfig().choose_folder()) == "runs/demo-1"
    DemoConfig().choose_folder().mkdir(parents=True)
    assert str(DemoConfig().choose_folder()) == "runs/demo-2"
    assert DemoConfig(output=tmp_path / "x").choose_folder() == tmp_path / "x"


def test_the_table_names_runs_that_missed_the_target_or_diverged(capsys):
    rows = []
    for name, scores in {"a": (96.0, 94.0), "b": (float("nan"), 97.0)}.items():
        runs = {
            seed: FinishedRun(Path(), ACCURACY, score, 10 if score > 95 else None, 5.0, 1.0)
            for seed, score in enumerate(scores)
        }
        score = mean_interval(scores)
        rows.append(ArmResult(name, f"{name}=sgd:lr=0.5", runs, score, None, 1.0, None))
    demo.print_result(Comparison(Path(), tuple(rows), 2, 95.0, 0).compare_with(0))
    a, b = capsys.readouterr().out.splitlines()[2:4]
    assert a.split() == ["a", "0.5", "95.00", "±", "12.71", "10", "(1", "never)"]
    assert b.split() == ["b", "0.5", "97.00", "(1", "diverged)", "−3.00", "10", "(1", "never)"]


@pytest.mark.usefixtures("threads", "no_report")
def test_prints_a_table_and_a_sentence(tmp_path, capsys, monkeypatch):
    def short(self):
        return dataclasses.replace(whole(self), epochs=1)

    whole = DemoConfig.make_comparison
    monkeypatch.setattr(DemoConfig, "make_comparison", short)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--seeds", "2", "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    for name in ARMS:
        assert f"\n{name} " in printed
    assert printed.count("After 40 steps and over 2 seeds, Neumann spectral ") == 1
    assert "Anything else counts as a tie" in " ".join(printed.split())
    assert "without Muon" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert "records: runs/demo-1\n" in printed
    assert "report: runs/demo-1/" in printed


def test_without_timm_it_leaves_muon_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    monkeypatch.setattr(demo, "run_and_print", lambda study, print_comparison: None)
    assert main(["demo", "--output", str(tmp_path)]) == 0
    assert "\nwithout Muon, which needs timm: run `pip install" in capsys.readouterr().out
    assert demo.list_arms() == [name for name in ARMS if name != "Muon"]
