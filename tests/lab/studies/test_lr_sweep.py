"""Sweeps give arms equal budgets, choose without the test set, and can be resumed."""

import json
import math

import pytest

from neumann.lab.commands.main import main
from neumann.lab.commands.tables import list_search_notes, tabulate_search
from neumann.lab.errors import UsageError
from neumann.lab.metrics import ACCURACY, LOSS
from neumann.lab.report.study_records import read_study
from neumann.lab.storage import folders
from neumann.lab.storage.reading import read_config, read_json_object
from neumann.lab.studies.comparison import Session
from neumann.lab.studies.engine import Study
from neumann.lab.studies.lr_sweep import choose_lr, make_grid, search
from neumann.lab.studies.settings import SweepConfig
from neumann.lab.studies.statistics import Interval
from neumann.lab.studies.study_files import get_run_folder, lock_folder
from neumann.lab.studies.workers import StudyObserver

pytestmark = pytest.mark.slow

SMALL = SweepConfig(
    arms=("sgd", "adamw:lr=1e-3:4e-3:3"), lr="0.1:1e30:3", epochs=2, search_epochs=1, seeds=2
)


def compare_winners(config, folder, found):
    """Train the winners of a search, and compare them on the test set."""
    (comparison,) = Study.of(config, folder).test({folder: found}, Session())
    return comparison


def score(mean, diverged=0):
    return Interval(mean, None, None, 0 if mean is None else 1, diverged)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    found = search(SMALL, folder)
    return folder, found, compare_winners(SMALL, folder, found)


# ---------------------------------------------------------------------- the grid


def test_range_is_geometric_with_exact_ends():
    grid = make_grid(SweepConfig(arms=("sgd", "adam:lr=1e-4:1e-2:7"), lr="0.05:3.2:7"))
    assert grid["sgd"] == (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
    assert grid["adam:lr=1e-4:1e-2:7"][0] == 1e-4
    assert grid["adam:lr=1e-4:1e-2:7"][3] == 1e-3
    assert grid["adam:lr=1e-4:1e-2:7"][1] == 0.000215  # three digits


def test_default_is_seven_rates_around_the_default_rate():
    grid = make_grid(SweepConfig(arms=("sgd", "adamw")))
    assert grid["sgd"] == (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
    assert grid["adamw"][3] == 2e-3
    assert all(len(values) == 7 for values in grid.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": "0.1"}, "--lr must be LOW:HIGH:COUNT, such as 0.05:3.2:7"),
        ({"lr": "0.1:x:3"}, "got '0.1:x:3'"),
        ({"lr": "3:1:3"}, "0 < LOW < HIGH"),
        ({"lr": "0:1:3"}, "0 < LOW < HIGH"),
        ({"lr": "1:inf:3"}, "0 < LOW < HIGH"),
        ({"lr": "1:2:1"}, "LOW:HIGH:COUNT"),
        ({"lr": "1:1.001:9"}, "too close"),
        ({"lr": "1:2:3", "arms": ("sgd:lr=1:2:4", "adam")}, "sgd:lr=1:2:4 has 4, adam has 3"),
        ({"arms": ("sgd:lr=0.1",)}, "sgd:lr=0.1: lr must be LOW:HIGH:COUNT"),
        ({"lr": "1:2:3", "arms": ("sgd", "sgd:lr=2:4:3")}, "--arms names sgd twice"),
        ({"arms": ("sgdd",)}, "did you mean sgd"),
        ({"search_seeds": 0}, "--search-seeds must be at least 1"),
        ({"search_epochs": 0}, "--search-epochs must be at least 1"),
        ({"held_out": True}, "--held-out is for train and compare"),
        ({"model": "mlpp"}, "did you mean mlp"),
        ({"search_epochs": 1, "ramp_epochs": 2.0}, "--ramp-epochs"),
    ],
)
def test_unusable_settings_are_refused_and_nothing_is_written(settings, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        search(SweepConfig(**settings), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_arm_with_the_rate_of_another_is_not_searched():
    config = SweepConfig(arms=("paper=neumann:lr=0.1:0.4:3", "plain=neumann:cubic=0,lr=paper"))
    assert list(make_grid(config).values()) == [(0.1, 0.2, 0.4), ()]
    with pytest.raises(UsageError, match="lr must be LOW:HIGH:COUNT"):
        make_grid(SweepConfig(arms=("neumann", "plain=neumann:cubic=0,lr=nobody")))


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
def test_choose_lr(scores, chosen):
    assert choose_lr((0.1, 0.2, 0.4), tuple(scores)) == chosen


def test_text_chooses_the_lowest_loss():
    scores = (
        Interval(3.2, None, None, 1),
        Interval(2.9, None, None, 1),
        Interval(3.0, 2.9, 3.1, 2),
    )
    assert choose_lr((0.1, 0.2, 0.4), scores, LOSS) == 0.2
    assert choose_lr((0.1, 0.2, 0.4), scores, ACCURACY) == 0.1


@pytest.mark.slow
def test_the_search_never_sees_the_test_set(finished):
    folder, found, _ = finished
    for each in found:
        for lr in each.lrs:
            run = get_run_folder(folder / "search", f"{each.name}:lr={lr}", 0)
            assert read_config(run)["held_out"] is True
            assert read_config(run)["epochs"] == 1


@pytest.mark.slow
def test_winners_are_trained_on_the_whole_training_set(finished):
    _, found, comparison = finished
    assert [row.arm for row in comparison.rows] == [f"{e.name}:lr={e.best}" for e in found]
    for row in comparison.rows:
        assert sorted(row.runs) == [0, 1]
        config = read_config(row.runs[0].folder)
        assert (config["held_out"], config["epochs"]) == (False, 2)


def test_named_arms_and_those_that_follow_another(tmp_path):
    arms = ("base=sgd:lr=0.1:0.2:2@batch-size=32@epochs=3", "heavy=sgd:momentum=0.95,lr=base")
    config = SweepConfig(arms=arms, epochs=1, search_epochs=2, seeds=1)
    found = search(config, tmp_path)
    comparison = compare_winners(config, tmp_path, found)
    best = found[0].best
    assert [(each.name, each.best) for each in found] == [("base", best), ("heavy", best)]
    assert {f.parent.parent.name for f in tmp_path.glob("search/*/*/summary.json")} == {
        "base_at_0.1",
        "base_at_0.2",
    }
    assert read_config(tmp_path / "search/base_at_0.1/seed-0")["epochs"] == 3
    assert [row.arm for row in comparison.rows] == ["base", "heavy"]
    configs = [read_config(row.runs[0].folder) for row in comparison.rows]
    assert [c["batch_size"] for c in configs] == [32, 64]
    assert [c["epochs"] for c in configs] == [3, 1]
    assert [c["lr"] for c in configs] == [best, best]
    study = read_study(tmp_path)
    assert [arm.name for arm in study.arms] == ["base", "heavy"]
    assert [each.arm for each in study.sensitivities] == ["base"]
    assert study.search.winners == {"base": best, "heavy": best}
    notes = list_search_notes(found)
    assert len(notes) == 2  # heavy has no range that could be too narrow
    assert tabulate_search(found).row_count == 2


def test_sweep_file(finished):
    folder, found, _ = finished
    content = read_json_object(folder / "sweep.json")
    assert content["format"] == 1
    assert content["grid"] == {each.arm: list(each.lrs) for each in found}
    assert content["winners"] == {each.arm: each.best for each in found}
    assert (content["search_seeds"], content["seeds"]) == (1, 2)
    sgd = found[0]
    assert sgd.scores[-1].diverged == 1
    assert sgd.best != sgd.lrs[-1]


def test_finished_sweep_is_not_repeated(finished, monkeypatch):
    folder, found, comparison = finished
    monkeypatch.setattr(
        "neumann.lab.studies.comparison.train_run", None
    )  # would be called otherwise
    assert search(SMALL, folder) == found
    assert compare_winners(SMALL, folder, found) == comparison


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"lr": "0.2:1e30:3"}, "grid.sgd"),
        ({"batch_size": 32}, "batch_size is 64 there, 32 here"),
        ({"search_seeds": 2}, "search_seeds is 1 there, 2 here"),
    ],
)
def test_sweep_with_other_settings_is_refused(finished, changes, difference):
    folder, _, _ = finished
    before = (folder / "sweep.json").read_bytes()
    other = SweepConfig(**{**SMALL.as_dict(), **changes})
    with pytest.raises(UsageError, match="holds a sweep with other settings: .*" + difference):
        search(other, folder)
    assert (folder / "sweep.json").read_bytes() == before


def test_sweep_written_before_a_setting_existed_continues(finished, monkeypatch):
    folder, found, _ = finished
    monkeypatch.setattr(
        "neumann.lab.studies.comparison.train_run", None
    )  # would be called otherwise
    content = json.loads((folder / "sweep.json").read_text())
    del content["config"]["cuda_graph"]
    (folder / "sweep.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match="cuda_graph is not set there, 'off' here"):
        search(SweepConfig(**{**SMALL.as_dict(), "cuda_graph": "off"}), folder)
    assert search(SMALL, folder) == found


def test_folder_is_locked(finished, monkeypatch):
    folder, found, _ = finished
    monkeypatch.setattr(folders, "LOCK_TIMEOUT", 0.0)
    with lock_folder(folder):
        for call in (lambda: search(SMALL, folder), lambda: compare_winners(SMALL, folder, found)):
            with pytest.raises(UsageError, match=f"{folder} is in use by another process"):
                call()
    assert search(SMALL, folder) == found


def test_search_that_never_left_the_warmup_is_noted(tmp_path):
    config = SweepConfig(arms=("neumann",), lr="0.1:0.2:2", epochs=1)
    notes = list_search_notes(search(config, tmp_path))
    assert notes[-1].startswith("neumann: all 20 steps were its SGD warm-up; ")
    assert notes[-1].endswith(" never began in the search")


def test_interrupted_search_has_no_winners_and_continues(tmp_path):
    class Stop(Exception):
        pass

    class StopAtSecond(StudyObserver):
        count = 0

        def on_finish(self, arm, seed, result):
            self.count += 1
            if self.count == 2:
                raise Stop

    config = SweepConfig(arms=("sgd",), lr="0.1:0.4:3", epochs=1, seeds=1)
    with pytest.raises(Stop):
        search(config, tmp_path, StopAtSecond())
    assert read_json_object(tmp_path / "sweep.json")["winners"] is None

    class Began(StudyObserver):
        def on_start(self, finished, total):
            self.counts = finished, total

    began = Began()
    found = search(config, tmp_path, began)
    assert began.counts == (2, 3)
    assert read_json_object(tmp_path / "sweep.json")["winners"] == {"sgd": found[0].best}


# ---------------------------------------------------------------------- the command


@pytest.mark.usefixtures("no_report")
def test_command_prints_both_tables(finished, capsys):
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
    # The written file can be used as --config.
    again = ["sweep", "--config", str(folder / "sweep.json"), "--output", str(folder)]
    assert main(again) == 0
    assert json.loads((folder / "sweep.json").read_text())["seeds"] == 2


@pytest.mark.slow
def test_arm_that_always_diverged_is_left_out(tmp_path, capsys):
    words = ["sweep", "--arms", "sgd:lr=1e30:1e31:2", "adamw", "--lr", "1e-3:2e-3:2"]
    words += ["--epochs", "1", "--seeds", "1", "--output", str(tmp_path / "x")]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "sgd diverged at every learning rate and is left out" in printed
    assert f"report: {tmp_path / 'x'}" in printed
    assert list(read_json_object(tmp_path / "x" / "sweep.json")["winners"]) == ["adamw"]


def test_exit_code_if_everything_diverged(tmp_path, capsys):
    words = ["sweep", "--arms", "sgd", "--lr", "1e30:1e31:2", "--epochs", "1"]
    assert main([*words, "--output", str(tmp_path / "x")]) == 3
    assert "neumann: every run of sgd diverged" in capsys.readouterr().err
    assert not (tmp_path / "x" / "final").exists()


def test_scores_come_from_the_held_out_part(finished):
    """A tenth of 1,437 images: accuracies are multiples of 1/144."""
    _, found, _ = finished
    for each in found:
        for each_score in each.scores:
            if each_score.mean is not None:
                right = each_score.mean * 144 / 100
                assert math.isclose(right, round(right), abs_tol=1e-4)
