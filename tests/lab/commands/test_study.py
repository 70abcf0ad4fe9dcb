"""`neumann study`: what it runs, lists, continues and refuses."""

import json

import pytest

from neumann.lab.commands.main import main
from neumann.lab.storage.reading import read_config, read_summary
from tests.support.programs import run_ranks

pytestmark = pytest.mark.slow

STUDY = """
title = "Batches"
[settings]
data = "digits"
epochs = 1
device = "cpu"
[arms.neumann]
opt = "neumann:warmup=10%"
[arms.base]
opt = "sgd"
sched = "constant"
[axes]
batch_size = [64, 128]
[tuning]
lr = "0.1:0.2:2"
at = {batch_size = 64}
scale = "linear"
[test]
seeds = 2
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "batches.toml"
    path.write_text(STUDY)
    return path


@pytest.fixture(scope="module")
def finished(file):
    folder = file.parent / "out"
    assert main(["study", str(file), "--output", str(folder)]) == 0
    return folder


def test_points_are_sweeps_and_comparisons(finished):
    assert json.loads((finished / "study.json").read_text())["axes"] == {"batch_size": [64, 128]}
    tuned, follower = finished / "batch_size=64", finished / "batch_size=128"
    winners = json.loads((tuned / "sweep.json").read_text())["winners"]
    for (arm, lr), name in zip(winners.items(), ("neumann", "base"), strict=True):
        assert arm.startswith(f"{name}=")
        here, there = (read_config(p / name / "seed-1") for p in (tuned / "final", follower))
        assert (here["lr"], there["lr"]) == (lr, 2 * lr)
        assert (here["batch_size"], there["batch_size"]) == (64, 128)
        assert here["sched"] == there["sched"] == ("constant" if name == "base" else "linear")
    assert not (follower / "search").exists()


def test_pages_of_the_study_and_its_points(finished):
    page = (finished / "report.html").read_text()
    assert "<h1>Batches</h1>" in page
    assert 'href="batch_size=64/report.html"' in page
    assert "Accuracy, % by batch size" in page
    assert "Learning rates chosen on held-out data" in page
    assert "<h1>Batches: batch size 64</h1>" in (finished / "batch_size=64/report.html").read_text()
    assert (finished / "plots/along-0.png").stat().st_size > 1000


@pytest.mark.usefixtures("no_report")
def test_finished_study_is_listed_and_not_repeated(finished, file, capsys, monkeypatch):
    monkeypatch.setattr("neumann.lab.studies.comparison.train_run", None)
    words = ["study", str(file), "--output", str(finished)]
    assert main([*words, "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "12 runs: 12 finished"
    assert lines[1].split()[:4] == ["search", "neumann", "at", "0.1"]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert main([*words, "--set", "epochs=3", "--list"]) == 2  # as without --list
    assert "holds a sweep with other settings: epochs is" in capsys.readouterr().err
    assert "\nbatch_size=128\n" in printed.out
    assert f": widen the range of lr in {file}, and use another --output\n" in printed.out
    assert "--lr" not in printed.out  # a flag that this command does not have
    assert printed.err == "search 4/4  finished before\nfinal 8/8  finished before\n"


@pytest.mark.usefixtures("no_report")
def test_study_stops_after_its_seconds_and_continues(tmp_path, file, capsys):
    words = ["study", str(file), "--output", str(tmp_path / "x"), "--set", "batch-size=64"]
    assert main([*words, "--list"]) == 0
    assert not (tmp_path / "x").exists()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "8 runs: 8 to do"
    assert "to be chosen" in lines[-2]
    assert main([*words, "--seconds", "0"]) == 0
    assert "--seconds ran out after 0 of 4 runs; run the same command" in capsys.readouterr().err
    assert main(words) == 0
    assert "final 4/4" in capsys.readouterr().err
    assert main([*words, "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "8 runs: 8 finished"
    # Without axes, it is the folder of a sweep.
    assert (tmp_path / "x" / "sweep.json").is_file()


@pytest.mark.usefixtures("no_report")
def test_study_may_stop_after_its_search(tmp_path, file, capsys):
    words = ["study", str(file), "--output", str(tmp_path / "x"), "--set", "batch-size=64"]
    assert main([*words, "--search-only"]) == 0
    assert "search 4/4" in capsys.readouterr().err
    assert main([*words, "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "8 runs: 4 finished, 4 to do"
    untuned = tmp_path / "untuned.toml"
    untuned.write_text('[settings]\ndata = "digits"\n[arms.sgd]\nlr = 0.1\n')
    assert main(["study", str(untuned), "--search-only"]) == 2
    assert "has no [tuning], so there is nothing to search" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('sched = "constant"', 'sched = "konstant"', "--sched"),
        ("128]", "10000]", "larger than the training set"),
        ('opt = "sgd"', 'opt = "sgd:mometum=0.9"', "unknown sgd option 'mometum'"),
        ('lr = "0.1:0.2:2"', 'lr = "0.1"', "lr must be LOW:HIGH:COUNT"),
        ('data = "digits"', 'data = "digitz"', "unknown data set 'digitz'"),
        ('opt = "sgd"', 'opt = "neumann:precondition=mine:Signs"', "--allow-code"),
    ],
)
def test_file_that_cannot_work_is_refused_before_anything_starts(
    old, new, message, tmp_path, capsys
):
    file = tmp_path / "s.toml"
    file.write_text(STUDY.replace(old, new))
    assert main(["study", str(file), "--output", str(tmp_path / "x")]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["study"], "needs a TOML file"),
        (["study", "none.toml"], "none.toml: No such file"),
        (["study", "x", "--jobs", "0"], "--jobs must be at least 1"),
        (["study", "x", "--lst"], "did you mean --list"),
    ],
)
def test_unusable_commands(words, message, capsys):
    assert main(words) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


def test_another_study_in_the_folder_is_refused(finished, file, tmp_path, capsys):
    words = ["compare", "--arms", "sgd", "--epochs", "1", "--seeds", "1"]
    assert main([*words, "--output", str(finished)]) == 2
    assert "already holds a study" in capsys.readouterr().err
    changed = ["study", str(file), "--output", str(finished), "--set", "smoothing=0.1"]
    assert main(changed) == 2
    assert "with other settings: smoothing is 0.0 there, 0.1 here" in capsys.readouterr().err


@pytest.mark.distributed
def test_processes_of_torchrun_train_every_run_together(tmp_path):
    file = tmp_path / "s.toml"
    text = STUDY.replace("[64, 128]", "[64]").replace("seeds = 2", "seeds = 1")
    file.write_text(text)
    words = ("-m", "neumann", "study", str(file), "--output", str(tmp_path / "two"))
    leader, follower = run_ranks(2, *words)
    assert (leader.returncode, follower.returncode) == (0, 0), leader.stderr + follower.stderr
    assert "report: " in leader.stdout
    assert "report: " not in follower.stdout
    assert main(["study", str(file), "--output", str(tmp_path / "one")]) == 0
    for name in ("search/neumann_at_0.1", "final/neumann", "final/base"):
        two, one = (
            read_summary(tmp_path / where / "batch_size=64" / name / "seed-0")
            for where in ("two", "one")
        )
        assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-4)
    refused = run_ranks(2, *words, "--set", "smoothing=0.1")
    assert refused[0].returncode == 2
    assert "with other settings: smoothing" in refused[0].stderr
