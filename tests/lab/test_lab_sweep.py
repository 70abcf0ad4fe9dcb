"""Sweeps: equal budgets, chosen without the test set, and taken up where they were left."""

import json
import math

import pytest

from neumann.cli import main
from neumann.lab import locks
from neumann.lab.compare import claimed
from neumann.lab.comparison import run_folder
from neumann.lab.errors import UsageError
from neumann.lab.reading import read_config, read_object
from neumann.lab.statistics import Interval
from neumann.lab.studies import SweepConfig
from neumann.lab.sweep import best, final, search, sweep_grid
from neumann.lab.tables import search_notes
from neumann.lab.workers import Watch

SMALL = SweepConfig(
    arms=("sgd", "adamw:lr=1e-3:4e-3:3"), lr="0.1:1e30:3", epochs=2, search_epochs=1, seeds=2
)


def score(mean, diverged=0):
    return Interval(mean, None, None, 0 if mean is None else 1, diverged)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    found = search(SMALL, folder)
    return folder, found, final(SMALL, folder, found)


# ---------------------------------------------------------------------- the grid


def test_a_range_is_geometric_and_its_ends_are_as_given():
    grid = sweep_grid(SweepConfig(arms=("sgd", "adam:lr=1e-4:1e-2:7"), lr="0.05:3.2:7"))
    assert grid["sgd"] == (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
    assert grid["adam:lr=1e-4:1e-2:7"][0] == 1e-4
    assert grid["adam:lr=1e-4:1e-2:7"][3] == 1e-3
    assert grid["adam:lr=1e-4:1e-2:7"][1] == 0.000215  # three digits


def test_without_a_range_seven_about_the_usual_one():
    grid = sweep_grid(SweepConfig(arms=("sgd", "adamw")))
    assert grid["sgd"] == (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
    assert grid["adamw"][3] == 2e-3
    assert all(len(values) == 7 for values in grid.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": "0.1"}, "--lr must be LOW:HIGH:COUNT, as in 0.05:3.2:7"),
        ({"lr": "0.1:x:3"}, "got '0.1:x:3'"),
        ({"lr": "3:1:3"}, "0 < LOW < HIGH"),
        ({"lr": "0:1:3"}, "0 < LOW < HIGH"),
        ({"lr": "1:inf:3"}, "0 < LOW < HIGH"),
        ({"lr": "1:2:1"}, "LOW:HIGH:COUNT"),
        ({"lr": "1:1.001:9"}, "too close"),
        ({"lr": "1:2:3", "arms": ("sgd:lr=1:2:4", "adam")}, "sgd:lr=1:2:4 has 4, adam has 3"),
        ({"arms": ("sgd:lr=0.1",)}, "sgd:lr=0.1: lr must be LOW:HIGH:COUNT"),
        ({"lr": "1:2:3", "arms": ("sgd", "sgd:lr=2:4:3")}, "--arms names sgd twice"),
        ({"arms": ("sgdd",)}, "the nearest: sgd"),
        ({"search_seeds": 0}, "--search-seeds must be at least 1"),
        ({"search_epochs": 0}, "--search-epochs must be at least 1"),
        ({"held_out": True}, "--held-out is for train and compare"),
        ({"model": "mlpp"}, "the nearest: mlp"),
        ({"search_epochs": 1, "ramp_epochs": 2.0}, "--ramp-epochs"),
    ],
)
def test_what_cannot_work_is_refused_and_nothing_written(settings, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        search(SweepConfig(**settings), tmp_path / "new")
    assert not (tmp_path / "new").exists()


# ---------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("scores", "chosen"),
    [
        ([score(90.0), score(95.0), score(94.0)], 0.2),
        ([score(95.0), score(95.0 + 1e-12), score(94.0)], 0.1),  # a tie
        ([score(90.0), score(99.0, diverged=1), score(None, diverged=2)], 0.1),
        ([score(None, diverged=2), score(50.0, diverged=1), score(None, diverged=2)], 0.2),
        ([score(None, diverged=1)] * 3, None),
    ],
)
def test_the_best(scores, chosen):
    assert best((0.1, 0.2, 0.4), tuple(scores)) == chosen


def test_the_search_never_sees_the_test_set(finished):
    folder, found, _ = finished
    for each in found:
        for lr in each.lrs:
            run = run_folder(folder / "search", f"{each.name}:lr={lr}", 0)
            assert read_config(run)["held_out"] is True
            assert read_config(run)["epochs"] == 1


def test_the_winners_are_trained_on_everything(finished):
    _, found, comparison = finished
    assert [row.arm for row in comparison.rows] == [f"{e.name}:lr={e.best}" for e in found]
    for row in comparison.rows:
        assert sorted(row.runs) == [0, 1]
        config = read_config(row.runs[0].folder)
        assert (config["held_out"], config["epochs"]) == (False, 2)


def test_what_is_kept(finished):
    folder, found, _ = finished
    content = read_object(folder / "sweep.json")
    assert content["format"] == 1
    assert content["grid"] == {each.arm: list(each.lrs) for each in found}
    assert content["winners"] == {each.arm: each.best for each in found}
    assert (content["search_seeds"], content["seeds"]) == (1, 2)
    sgd = found[0]
    assert sgd.scores[-1].diverged == 1
    assert sgd.best != sgd.lrs[-1]


def test_a_finished_sweep_repeats_nothing(finished, monkeypatch):
    folder, found, comparison = finished
    monkeypatch.setattr("neumann.lab.compare.train", None)  # would be called otherwise
    assert search(SMALL, folder) == found
    assert final(SMALL, folder, found) == comparison


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"lr": "0.2:1e30:3"}, "grid.sgd"),
        ({"batch_size": 32}, "batch_size is 64 there, 32 here"),
        ({"search_seeds": 2}, "search_seeds is 1 there, 2 here"),
    ],
)
def test_another_sweep_in_the_folder_is_refused(finished, changes, difference):
    folder, _, _ = finished
    before = (folder / "sweep.json").read_bytes()
    other = SweepConfig(**{**SMALL.as_dict(), **changes})
    with pytest.raises(UsageError, match="holds another sweep: .*" + difference):
        search(other, folder)
    assert (folder / "sweep.json").read_bytes() == before


def test_a_sweep_that_is_older_than_a_setting_goes_on(finished, monkeypatch):
    folder, found, _ = finished
    monkeypatch.setattr("neumann.lab.compare.train", None)  # would be called otherwise
    content = json.loads((folder / "sweep.json").read_text())
    del content["config"]["cuda_graph"]
    (folder / "sweep.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match="cuda_graph is not set there, 'off' here"):
        search(SweepConfig(**{**SMALL.as_dict(), "cuda_graph": "off"}), folder)
    assert search(SMALL, folder) == found


def test_the_folder_is_for_one_process_at_a_time(finished, monkeypatch):
    folder, found, _ = finished
    monkeypatch.setattr(locks, "PATIENCE", 0.0)
    with claimed(folder):
        for call in (lambda: search(SMALL, folder), lambda: final(SMALL, folder, found)):
            with pytest.raises(UsageError, match=f"{folder} is in use by another process"):
                call()
    assert search(SMALL, folder) == found


def test_a_search_that_only_warmed_up_says_so(tmp_path):
    config = SweepConfig(arms=("neumann",), lr="0.1:0.2:2", epochs=1)
    notes = search_notes(search(config, tmp_path))
    assert notes[-1].startswith("neumann: all 20 steps were its SGD warm-up; ")
    assert notes[-1].endswith(" never began in the search")


def test_an_interrupted_search_has_no_winners_yet_and_goes_on(tmp_path):
    class Stop(Exception):
        pass

    class StopAtSecond(Watch):
        count = 0

        def ended(self, arm, seed, result):
            self.count += 1
            if self.count == 2:
                raise Stop

    config = SweepConfig(arms=("sgd",), lr="0.1:0.4:3", epochs=1, seeds=1)
    with pytest.raises(Stop):
        search(config, tmp_path, StopAtSecond())
    assert read_object(tmp_path / "sweep.json")["winners"] is None

    class Began(Watch):
        def began(self, there, total):
            self.counts = there, total

    began = Began()
    found = search(config, tmp_path, began)
    assert began.counts == (2, 3)
    assert read_object(tmp_path / "sweep.json")["winners"] == {"sgd": found[0].best}


# ---------------------------------------------------------------------- the command


@pytest.fixture
def no_report(monkeypatch):
    """Pictures take seconds."""
    monkeypatch.setattr("neumann.report.write_report", lambda folder: folder / "report.html")


@pytest.mark.usefixtures("no_report")
def test_the_command(finished, capsys):
    folder, _, _ = finished
    words = ["sweep", "--arms", *SMALL.arms, "--lr", SMALL.lr, "--epochs", "2"]
    words += ["--search-epochs", "1", "--seeds", "2", "--output", str(folder)]
    assert main(words) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].split() == ["sgd", "lr", "0.1", "3.16e+14", "1e+30"]
    assert lines[1].split()[-1] == "diverged"
    assert sum("*" in line for line in lines[:4]) == 2
    assert any(
        "sgd: 0.1 is the smallest lr it tried, so the best is not bracketed" in x for x in lines
    )
    assert f"records: {folder}" in lines
    assert "search 6/6  finished before" in printed.err
    # What is kept can be run again.
    again = ["sweep", "--config", str(folder / "sweep.json"), "--output", str(folder)]
    assert main(again) == 0
    assert json.loads((folder / "sweep.json").read_text())["seeds"] == 2


def test_an_arm_that_diverged_everywhere_is_left_out(tmp_path, capsys):
    words = ["sweep", "--arms", "sgd:lr=1e30:1e31:2", "adamw", "--lr", "1e-3:2e-3:2"]
    words += ["--epochs", "1", "--seeds", "1", "--output", str(tmp_path / "x")]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "sgd diverged at every learning rate and is left out" in printed
    assert f"report: {tmp_path / 'x'}" in printed
    assert list(read_object(tmp_path / "x" / "sweep.json")["winners"]) == ["adamw"]


def test_where_all_diverged_there_is_nothing_to_test(tmp_path, capsys):
    words = ["sweep", "--arms", "sgd", "--lr", "1e30:1e31:2", "--epochs", "1"]
    assert main([*words, "--output", str(tmp_path / "x")]) == 3
    assert "neumann: every training of sgd diverged" in capsys.readouterr().err
    assert not (tmp_path / "x" / "final").exists()


def test_scores_are_of_the_held_out_part(finished):
    """A tenth of 1,437 images: whole numbers of 144 are right."""
    _, found, _ = finished
    for each in found:
        for each_score in each.scores:
            if each_score.mean is not None:
                right = each_score.mean * 144 / 100
                assert math.isclose(right, round(right), abs_tol=1e-4)
