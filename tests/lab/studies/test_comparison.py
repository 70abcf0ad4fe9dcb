"""Comparisons are paired and resumable, and report what diverged."""

import io
import json
import os
import signal

import pytest
import torch
from rich.console import Console

from neumann.lab.commands.tables import tabulate_comparison
from neumann.lab.errors import UsageError
from neumann.lab.storage import folders
from neumann.lab.storage.folders import new_run_folder
from neumann.lab.storage.reading import read_config, read_metrics
from neumann.lab.studies.comparison import OutOfTime, StudyInterrupted, run_comparison
from neumann.lab.studies.results import read_comparison
from neumann.lab.studies.settings import CompareConfig, SweepConfig
from neumann.lab.studies.study_files import get_run_folder
from neumann.lab.studies.workers import StudyObserver
from neumann.lab.training.checkpoints import Checkpoints
from tests.support.programs import FORK_WORKERS, run

pytestmark = pytest.mark.slow


class Ends(StudyObserver):
    """Records which runs ended, and how many had finished before."""

    def __init__(self):
        self.there, self.keys = None, []

    def on_start(self, finished, total):
        self.there = finished

    def on_finish(self, arm, seed, result):
        self.keys.append((arm, seed))


class Stop(Exception):
    pass


class StopAtFirst(StudyObserver):
    def on_finish(self, arm, seed, result):
        raise Stop


class Terminate(StudyObserver):
    """Sends SIGTERM during the last evaluation of the first run."""

    def on_line(self, arm, seed, line):
        if line["kind"] == "epoch" and line["epoch"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)


SMALL = CompareConfig(
    arms=("neumann:warmup_epochs=1", "sgd", "sgd:lr=1e30"), seeds=2, epochs=2, target=50.0
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    ends = Ends()
    comparison = run_comparison(SMALL, folder, ends)
    return folder, comparison, ends


@pytest.mark.slow
def test_runs_are_trained_seed_by_seed(finished):
    _, _, ends = finished
    assert ends.there == 0
    assert ends.keys == [(arm, seed) for seed in range(2) for arm in SMALL.arms]


@pytest.mark.slow
def test_arms_share_initial_weights_and_data(finished):
    """With a learning rate of zero, all losses are equal."""
    folder, _, _ = finished
    config = CompareConfig(arms=("sgd:lr=0.0", "adamw:lr=0.0"), seeds=1, epochs=1, log_every=1)
    run_comparison(config, folder / "still")
    losses = [
        [m["train_loss"] for m in read_metrics(get_run_folder(folder / "still", arm, 0))]
        for arm in config.arms
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_signal_during_the_last_evaluation_of_a_run_stops_the_study(tmp_path, jobs):
    """The run has ended, but no other may begin."""
    config = CompareConfig(arms=("sgd", "adamw"), seeds=3, epochs=2, jobs=jobs)
    with pytest.raises(StudyInterrupted, match="stopped by SIGTERM") as stopped:
        run_comparison(config, tmp_path, Terminate())
    assert 1 <= stopped.value.ended <= jobs
    assert stopped.value.total == 6


def test_rows_hold_paired_differences(finished):
    _, comparison, _ = finished
    first, sgd, wild = comparison.rows
    assert first.difference is None
    assert sgd.difference.n == 2
    assert sgd.difference.mean == pytest.approx(first.score.mean - sgd.score.mean)
    assert all(run.epochs_to_target == run.steps_to_target / 22 for run in sgd.runs.values())
    assert wild.score.mean is None
    assert wild.score.diverged == 2
    assert wild.difference.n == 0


def test_diverged_arm_is_reported(finished):
    _, comparison, _ = finished
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(tabulate_comparison(comparison))
    lines = console.export_text().splitlines()
    assert "diverged" in next(line for line in lines if line.startswith("sgd:lr=1e30"))
    assert any("diverged" in sentence for sentence in comparison.state_verdicts())


def test_finished_comparison_is_not_repeated(finished, monkeypatch):
    folder, comparison, _ = finished
    monkeypatch.setattr(
        "neumann.lab.studies.comparison.train_run", None
    )  # would be called otherwise
    assert run_comparison(SMALL, folder) == comparison


def test_interrupted_comparison_continues(tmp_path, finished):
    config = CompareConfig(arms=SMALL.arms[:2], seeds=1, epochs=2, target=50.0)
    with pytest.raises(Stop):
        run_comparison(config, tmp_path, StopAtFirst())
    before = os.stat(get_run_folder(tmp_path, config.arms[0], 0) / "summary.json").st_mtime_ns
    comparison = run_comparison(config, tmp_path)
    after = os.stat(get_run_folder(tmp_path, config.arms[0], 0) / "summary.json").st_mtime_ns
    assert before == after
    assert [row.runs[0].score for row in comparison.rows] == [
        row.runs[0].score for row in finished[1].rows[:2]
    ]


COMPARE = """
import sys
from pathlib import Path
from neumann.lab.studies.comparison import run_comparison
from neumann.lab.studies.settings import CompareConfig
arms = tuple(sys.argv[1].split(","))
run_comparison(CompareConfig(arms=arms, seeds=1, epochs=2, target=50.0, jobs=2), Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_workers_give_the_same_weights(tmp_path, finished):
    folder, comparison, _ = finished
    config = CompareConfig(arms=SMALL.arms[:2], seeds=1, epochs=2, target=50.0, jobs=2)
    ended = run("-c", FORK_WORKERS + COMPARE, ",".join(config.arms), str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    ends = Ends()
    rows = run_comparison(config, tmp_path, ends).rows
    assert ends.keys == []
    assert [r.runs[0].score for r in rows] == [r.runs[0].score for r in comparison.rows[:2]]
    for arm in config.arms:
        ours, theirs = (
            Checkpoints(get_run_folder(where, arm, 0) / "checkpoints").load_latest().payload
            for where in (tmp_path, folder)
        )
        torch.testing.assert_close(ours["model"], theirs["model"], rtol=0, atol=0)


def test_arms_have_settings_of_their_own(tmp_path):
    """Batches of another size, and images that are shifted."""
    arms = ("sgd", "small=sgd@batch-size=32@shift=2@epochs=1")
    comparison = run_comparison(CompareConfig(arms=arms, seeds=1, epochs=2), tmp_path)
    first, small = comparison.rows
    assert (first.arm, small.arm, small.text) == ("sgd", "small", arms[1])
    assert small.runs[0].folder == tmp_path / "small" / "seed-0"
    configs = [read_config(row.runs[0].folder) for row in (first, small)]
    assert [c["batch_size"] for c in configs] == [64, 32]
    assert [read_metrics(r.runs[0].folder)[-1]["step"] for r in (first, small)] == [44, 44]
    assert "small" in comparison.state_verdicts()[0]


@pytest.mark.parametrize("jobs", [1, 2])
def test_no_run_starts_when_the_time_is_over(tmp_path, jobs):
    config = CompareConfig(arms=("sgd", "adamw"), seeds=2, epochs=1, jobs=jobs, seconds=0.0)
    with pytest.raises(OutOfTime, match=f"after 0 of 4 runs; .* {tmp_path} to continue"):
        run_comparison(config, tmp_path)
    assert read_comparison(tmp_path).missing == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arms": ()}, "--arms must name at least one"),
        ({"arms": ("sgd", "sgd")}, "--arms names sgd twice"),
        ({"arms": ("sgdd",)}, "unknown optimizer 'sgdd'"),
        ({"seeds": 0}, "--seeds must be at least 1"),
        ({"jobs": 0}, "--jobs must be at least 1"),
        ({"lr": -1.0}, "--lr must be a number of at least 0"),
        ({"model": "mlpp"}, "unknown model 'mlpp'; did you mean mlp"),
        ({"arms": ("sgd", "adamw:betas=3")}, "adamw:betas=3"),
        ({"batch_size": 10_000, "jobs": 2}, "larger than the training set"),
        (
            {"arms": ("adam:betas=(0.9,0.99)", "adam:betas=[0.9,0.99]")},
            r"'adam:betas=\(0.9,0.99\)' and 'adam:betas=\[0.9,0.99\]' would share the folder",
        ),
        ({"arms": (f"sgd:momentum=0.{9:0300}",)}, "sgd:momentum=0.000.*… is too long"),
    ],
)
def test_unusable_settings_are_refused_before_training(settings, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        run_comparison(CompareConfig(**settings), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_folder_of_a_run_is_refused(finished):
    folder, _, _ = finished
    run = get_run_folder(folder, "sgd", 0)
    with pytest.raises(UsageError, match="already holds a run"):
        run_comparison(CompareConfig(arms=("sgd",), seeds=1, epochs=1), run)
    assert not (run / "comparison.json").exists()


def test_seeds_and_arms_can_be_added_but_settings_cannot_change(tmp_path):
    config = CompareConfig(arms=("sgd",), seeds=1, epochs=1)
    run_comparison(config, tmp_path)
    more = CompareConfig(arms=("sgd", "adamw"), seeds=2, epochs=1)
    ends = Ends()
    run_comparison(more, tmp_path, ends)
    assert ends.there == 1
    assert ends.keys == [("adamw", 0), ("sgd", 1), ("adamw", 1)]
    assert read_comparison(tmp_path).missing == 0
    with pytest.raises(UsageError, match="other settings: epochs is 1 there, 2 here"):
        run_comparison(CompareConfig(arms=("sgd",), seeds=1, epochs=2), tmp_path)
    assert len(read_comparison(tmp_path).rows) == 2


def change_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_run_with_other_settings_is_refused(tmp_path):
    """As if "auto" had meant something else on the machine that trained it."""
    run_comparison(CompareConfig(arms=("sgd",), seeds=1, epochs=1), tmp_path)
    run = get_run_folder(tmp_path, "sgd", 0)
    change_json(run / "config.json", lambda content: content["config"].update(amp="bf16"))
    before = (tmp_path / "comparison.json").read_bytes()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"seed-0 holds .*: amp is 'bf16' there, 'off' here"):
            run_comparison(CompareConfig(arms=("sgd", "adamw"), seeds=1, epochs=1), tmp_path)
        (run / "summary.json").unlink(missing_ok=True)
    assert (tmp_path / "comparison.json").read_bytes() == before
    assert not get_run_folder(tmp_path, "adamw", 0).exists()


def test_comparison_written_before_a_setting_existed_continues(tmp_path):
    config = CompareConfig(arms=("sgd",), seeds=1, epochs=1)
    run_comparison(config, tmp_path)
    for file, part in (
        (tmp_path / "comparison.json", "settings"),
        (get_run_folder(tmp_path, "sgd", 0) / "config.json", "config"),
    ):
        change_json(file, lambda content, part=part: content[part].pop("cuda_graph"))
        change_json(file, lambda content, part=part: content[part].pop("spectrum_every"))
    with pytest.raises(UsageError, match="spectrum_every is not set there, 9 here"):
        run_comparison(CompareConfig(arms=("sgd",), seeds=1, epochs=1, spectrum_every=9), tmp_path)
    ends = Ends()
    run_comparison(config, tmp_path, ends)
    assert (ends.there, ends.keys) == (1, [])


def test_folder_is_locked(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "LOCK_TIMEOUT", 0.0)
    config = CompareConfig(arms=("sgd",), seeds=1, epochs=1)

    class Meanwhile(StudyObserver):
        def on_line(self, arm, seed, line):
            with pytest.raises(UsageError, match=f"{tmp_path} is in use by another process"):
                run_comparison(config, tmp_path)

    run_comparison(config, tmp_path, Meanwhile())
    run_comparison(config, tmp_path)
    assert not (tmp_path / folders.LOCK_NAME).exists()


def test_no_warmup_note_after_the_warmup(finished):
    _, comparison, _ = finished
    assert comparison.rows[0].long_warmup is None
    assert comparison.state_limits() == []


def test_long_path_gives_a_valid_folder_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = new_run_folder(SweepConfig(data=f"folder:{'/ä' * 300}").title)
    folder.mkdir(parents=True)
    assert folder.name.endswith("-mlp-sweep-1")


def test_unfinished_comparison_can_be_read(tmp_path):
    with pytest.raises(Stop):
        run_comparison(
            CompareConfig(arms=("sgd", "adamw"), seeds=2, epochs=1), tmp_path, StopAtFirst()
        )
    found = read_comparison(tmp_path)
    assert found.missing == 3
    assert found.rows[1].difference.pairs == 0
