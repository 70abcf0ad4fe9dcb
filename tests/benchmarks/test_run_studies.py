"""All studies with one command: archives, shared runs, time limits and signals."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.paper import run_studies
from benchmarks.paper.claim_tests import STUDIES
from benchmarks.paper.run_lines import RunKey, collect_study
from benchmarks.paper.run_studies import BY_THE_CLOCK, ORDER, Sitting, count_ended, train_all
from neumann.lab.errors import UsageError
from neumann.lab.studies.study_toml import read_study_toml
from tests.support.small_studies import write_study

MORE = '[arms.decayed]\nopt = "sgd"\nlr = "sgd"\nweight_decay = 0.1\n'
ROOT = Path(__file__).parents[2]


@pytest.fixture
def sitting(tmp_path):
    studies = tmp_path / "studies"
    studies.mkdir()
    write_study(studies / "first.toml")
    write_study(studies / "second.toml", more=MORE)
    return Sitting(studies, tmp_path / "runs", tmp_path / "archives")


def test_every_study_has_its_turn():
    assert sorted(ORDER) == sorted(path.stem for path in STUDIES.glob("*.toml"))
    assert set(BY_THE_CLOCK) <= set(ORDER)


@pytest.mark.slow
def test_studies_share_runs_and_continue_from_their_archives(sitting, tmp_path, capfd):
    assert sitting.train("first")
    assert sitting.train("second")
    printed = capfd.readouterr().out
    assert "first: 5 of 5 runs have ended" in printed
    assert "second: 7 of 7 runs have ended" in printed
    trained = "final/sgd/seed-0/summary.json"
    assert (tmp_path / "runs/second" / trained).read_bytes() == (
        tmp_path / "runs/first" / trained
    ).read_bytes()  # with its seconds, so it was shared
    late = Sitting(sitting.studies, tmp_path / "elsewhere", sitting.archives, deadline=0.0)
    late.unpack_all()
    assert late.train("first")
    study = read_study_toml(sitting.studies / "second.toml", tmp_path / "elsewhere/second")
    assert count_ended(study) == 7


@pytest.mark.slow
def test_runs_that_diverge_before_their_first_line_are_kept_and_shared(sitting, tmp_path):
    """They have a result, and no metrics."""
    wild = '[arms.wild]\nopt = "sgd"\nlr = "1e28:1e30:3"\n'
    for name in ("first", "second"):
        write_study(sitting.studies / f"{name}.toml", more=wild)
        assert sitting.train(name)
    lost = list(tmp_path.glob("runs/*/search/*wild*/seed-0/summary.json"))
    assert len(lost) == 6
    assert not any(path.with_name("metrics.jsonl").exists() for path in lost)
    late = Sitting(sitting.studies, tmp_path / "elsewhere", sitting.archives, deadline=0.0)
    late.unpack_all()
    assert late.train("first")
    found = collect_study(tmp_path / "elsewhere/first")
    assert found[RunKey("final", "", "wild", 0)]["diverged"]


@pytest.mark.slow
def test_a_study_that_only_takes_over_runs_is_collected(sitting, tmp_path):
    """It records what it compares, although it trains nothing."""
    for name in ("first", "second"):
        file = sitting.studies / f"{name}.toml"
        tuned = write_study(file).read_text()
        file.write_text(tuned.replace("[tuning]\n", "").replace('"0.1:0.4:3"', "0.1"))
        assert sitting.train(name)
        assert len(collect_study(tmp_path / "runs" / name)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("error", [UsageError("there is no data"), OSError("the disk is full")])
def test_a_study_that_fails_does_not_stop_the_next(sitting, monkeypatch, error):
    train = Sitting.train

    def fail_first(self, name):
        if name == "first":
            raise error
        return train(self, name)

    monkeypatch.setattr(Sitting, "train", fail_first)
    assert train_all(sitting, ["first", "second"]) == ([], {"first": str(error)})
    assert count_ended(read_study_toml(sitting.studies / "second.toml", sitting.root / "second"))


@pytest.mark.slow
def test_without_time_nothing_is_trained(sitting, capfd):
    late = Sitting(sitting.studies, sitting.root, sitting.archives, deadline=time.monotonic())
    assert not late.train("first")
    assert "first: 0 of 5 runs have ended" in capfd.readouterr().out
    assert not sitting.archives.exists()


@pytest.mark.slow
def test_a_signal_saves_what_runs_and_packs_what_has_ended(tmp_path):
    command = [sys.executable, "-m", "benchmarks.paper.run_studies", "reset-interval"]
    command += ["--root", str(tmp_path / "runs"), "--archives", str(tmp_path / "archives")]
    small = ["data=synthetic:8,10,4096", "model=mlp", "epochs=400", "flip=false", "shift=0"]
    command += ["--set", *small, "device=cpu", "batch-size=64"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("runs/*/search/*/seed-0/metrics.jsonl")):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "stopped: run the same command again to continue" in errors
    assert (tmp_path / "archives/reset-interval.tar.xz").exists()
    assert list(tmp_path.glob("runs/*/search/*/seed-0/checkpoints/*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["unknown"], "unknown: the studies are main-cifar10"),
        (["--set", "epochs=1"], "--set epochs is for a trial: name other --archives"),
        (["--lend", "nowhere"], "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_meant_is_refused(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run_studies", *words])
    with pytest.raises(SystemExit):
        run_studies.main()
    assert message in capsys.readouterr().err
