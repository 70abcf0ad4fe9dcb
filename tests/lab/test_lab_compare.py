"""Comparisons: paired, resumable, and honest about what diverged."""

import io
import json
import os
import re

import pytest
import torch
from rich.console import Console

from neumann.cli import main
from neumann.lab import locks
from neumann.lab.checkpoints import Checkpoints
from neumann.lab.compare import compare
from neumann.lab.comparison import read, run_folder
from neumann.lab.errors import UsageError
from neumann.lab.naming import fresh_folder
from neumann.lab.reading import read_metrics
from neumann.lab.studies import CompareConfig, SweepConfig
from neumann.lab.tables import table
from neumann.lab.workers import Watch


class Ends(Watch):
    """Keeps what has ended, and how many were there before."""

    def __init__(self):
        self.there, self.keys = None, []

    def began(self, there, total):
        self.there = there

    def ended(self, arm, seed, result):
        self.keys.append((arm, seed))


class Stop(Exception):
    pass


class StopAtFirst(Watch):
    def ended(self, arm, seed, result):
        raise Stop


SMALL = CompareConfig(
    arms=("neumann:warmup_epochs=1", "sgd", "sgd:lr=1e30"), seeds=2, epochs=2, target=50.0
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    ends = Ends()
    comparison = compare(SMALL, folder, ends)
    return folder, comparison, ends


def test_every_training_is_done_seed_by_seed(finished):
    _, _, ends = finished
    assert ends.there == 0
    assert ends.keys == [(arm, seed) for seed in range(2) for arm in SMALL.arms]


def test_arms_share_initial_weights_and_data(finished):
    """The first step's loss is that of the same weights on the same batch."""
    folder, _, _ = finished
    config = CompareConfig(arms=("sgd:lr=0.0", "adamw:lr=0.0"), seeds=1, epochs=1, log_every=1)
    compare(config, folder / "still")
    losses = [
        [m["train_loss"] for m in read_metrics(run_folder(folder / "still", arm, 0))]
        for arm in config.arms
    ]
    assert losses[0] == losses[1]


def test_rows(finished):
    _, comparison, _ = finished
    first, sgd, wild = comparison.rows
    assert first.difference is None
    assert sgd.difference.n == 2
    assert sgd.difference.mean == pytest.approx(first.accuracy.mean - sgd.accuracy.mean)
    assert all(run.epochs_to_target == run.steps_to_target / 22 for run in sgd.runs.values())
    assert wild.accuracy.mean is None
    assert wild.accuracy.diverged == 2
    assert wild.difference.n == 0


def test_a_diverged_arm_is_a_row_that_says_so(finished):
    _, comparison, _ = finished
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(comparison))
    lines = console.export_text().splitlines()
    assert "diverged" in next(line for line in lines if line.startswith("sgd:lr=1e30"))
    assert any("diverged" in sentence for sentence in comparison.verdicts())


def test_a_finished_comparison_repeats_nothing(finished, monkeypatch):
    folder, comparison, _ = finished
    monkeypatch.setattr("neumann.lab.compare.train", None)  # would be called otherwise
    assert compare(SMALL, folder) == comparison


def test_an_interrupted_comparison_goes_on(tmp_path, finished):
    """The first training is there already."""
    config = CompareConfig(arms=SMALL.arms[:2], seeds=1, epochs=2, target=50.0)
    with pytest.raises(Stop):
        compare(config, tmp_path, StopAtFirst())
    before = os.stat(run_folder(tmp_path, config.arms[0], 0) / "summary.json").st_mtime_ns
    comparison = compare(config, tmp_path)
    after = os.stat(run_folder(tmp_path, config.arms[0], 0) / "summary.json").st_mtime_ns
    assert before == after
    assert [row.runs[0].accuracy for row in comparison.rows] == [
        row.runs[0].accuracy for row in finished[1].rows[:2]
    ]


def test_side_by_side_is_the_same(tmp_path, finished):
    folder, comparison, _ = finished
    config = CompareConfig(arms=SMALL.arms[:2], seeds=1, epochs=2, target=50.0, jobs=2)
    rows = compare(config, tmp_path).rows
    assert [r.runs[0].accuracy for r in rows] == [r.runs[0].accuracy for r in comparison.rows[:2]]
    for arm in config.arms:
        ours, theirs = (
            Checkpoints(run_folder(where, arm, 0) / "checkpoints").latest().payload["model"]
            for where in (tmp_path, folder)
        )
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arms": ()}, "--arms must name at least one"),
        ({"arms": ("sgd", "sgd")}, "--arms names sgd twice"),
        ({"arms": ("sgdd",)}, "unknown optimizer 'sgdd'"),
        ({"seeds": 0}, "--seeds must be at least 1"),
        ({"jobs": 0}, "--jobs must be at least 1"),
        ({"lr": -1.0}, "--lr must be at least 0"),
        ({"model": "mlpp"}, "unknown model 'mlpp'; the nearest: mlp"),
        ({"arms": ("sgd", "adamw:betas=3")}, "adamw:betas=3"),
        ({"batch_size": 10_000, "jobs": 2}, "larger than the training set"),
        (
            {"arms": ("adam:betas=(0.9,0.99)", "adam:betas=[0.9,0.99]")},
            r"'adam:betas=\(0.9,0.99\)' and 'adam:betas=\[0.9,0.99\]' would share the folder",
        ),
        ({"arms": (f"sgd:momentum=0.{9:0300}",)}, "sgd:momentum=0.000.*… is too long"),
    ],
)
def test_bad_comparisons_are_refused_before_anything_is_trained(settings, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        compare(CompareConfig(**settings), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.fixture
def no_report(monkeypatch):
    """Pictures take seconds."""
    monkeypatch.setattr("neumann.report.write_report", lambda folder: folder / "report.html")


@pytest.mark.usefixtures("no_report")
def test_the_command(tmp_path, capsys):
    words = ["compare", "--arms", "sgd", "adamw:lr=2e-3", "sgd:lr=1e30", "--target", "50"]
    words += ["--seeds", "1", "--epochs", "1", "--output", str(tmp_path / "x")]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "adamw:lr=2e-3" in printed.out
    assert "steps to" in printed.out
    assert f"records: {tmp_path / 'x'}" in printed.out
    assert "…" not in printed.out  # nothing is cut where it is not a terminal
    lines = printed.err.splitlines()
    assert re.fullmatch(r"2/3  adamw:lr=2e-3  seed 0  \d+\.\d\d %", lines[1])
    assert lines[2] == "3/3  sgd:lr=1e30  seed 0  diverged"
    assert main(words) == 0
    assert capsys.readouterr().err.splitlines()[0] == "3/3  finished before"


def test_a_folder_that_holds_something_else_is_refused(finished):
    folder, _, _ = finished
    run = run_folder(folder, "sgd", 0)
    with pytest.raises(UsageError, match="holds a run already"):
        compare(CompareConfig(arms=("sgd",), seeds=1, epochs=1), run)
    assert not (run / "comparison.json").exists()


def test_seeds_and_arms_can_be_added_but_settings_not_changed(tmp_path):
    config = CompareConfig(arms=("sgd",), seeds=1, epochs=1)
    compare(config, tmp_path)
    more = CompareConfig(arms=("sgd", "adamw"), seeds=2, epochs=1)
    ends = Ends()
    compare(more, tmp_path, ends)
    assert ends.there == 1
    assert ends.keys == [("adamw", 0), ("sgd", 1), ("adamw", 1)]
    assert read(tmp_path).missing == 0
    with pytest.raises(UsageError, match="other settings: epochs is 1 there, 2 here"):
        compare(CompareConfig(arms=("sgd",), seeds=1, epochs=2), tmp_path)
    assert len(read(tmp_path).rows) == 2


def change_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_training_with_other_settings_is_refused_finished_or_not(tmp_path):
    """As where "auto" was something else on the machine that trained it."""
    compare(CompareConfig(arms=("sgd",), seeds=1, epochs=1), tmp_path)
    run = run_folder(tmp_path, "sgd", 0)
    change_json(run / "config.json", lambda content: content["config"].update(amp="bf16"))
    before = (tmp_path / "comparison.json").read_bytes()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"seed-0 holds .*: amp is 'bf16' there, 'off' here"):
            compare(CompareConfig(arms=("sgd", "adamw"), seeds=1, epochs=1), tmp_path)
        (run / "summary.json").unlink(missing_ok=True)
    assert (tmp_path / "comparison.json").read_bytes() == before
    assert not run_folder(tmp_path, "adamw", 0).exists()


def test_a_comparison_that_is_older_than_a_setting_goes_on(tmp_path):
    config = CompareConfig(arms=("sgd",), seeds=1, epochs=1)
    compare(config, tmp_path)
    for file, part in (
        (tmp_path / "comparison.json", "settings"),
        (run_folder(tmp_path, "sgd", 0) / "config.json", "config"),
    ):
        change_json(file, lambda content, part=part: content[part].pop("cuda_graph"))
        change_json(file, lambda content, part=part: content[part].pop("spectrum_every"))
    with pytest.raises(UsageError, match="spectrum_every is not set there, 9 here"):
        compare(CompareConfig(arms=("sgd",), seeds=1, epochs=1, spectrum_every=9), tmp_path)
    ends = Ends()
    compare(config, tmp_path, ends)
    assert (ends.there, ends.keys) == (1, [])


def test_the_folder_is_for_one_process_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "PATIENCE", 0.0)
    config = CompareConfig(arms=("sgd",), seeds=1, epochs=1)

    class Meanwhile(Watch):
        def line(self, arm, seed, line):
            with pytest.raises(UsageError, match=f"{tmp_path} is in use by another process"):
                compare(config, tmp_path)

    compare(config, tmp_path, Meanwhile())
    compare(config, tmp_path)
    assert not (tmp_path / locks.LOCK).exists()


@pytest.mark.usefixtures("no_report")
def test_notes_about_what_the_table_cannot_say(tmp_path, capsys):
    words = ["compare", "--epochs", "1", "--output", str(tmp_path)]
    assert main([*words, "--arms", "neumann", "sgd", "adamw", "--seeds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    warmup = "neumann: all 22 steps were its SGD warm-up; the Neumann iteration never began"
    assert lines[-4:-2] == [warmup, "p values are not corrected for multiple comparisons"]
    assert main([*words, "--arms", "sgd", "adamw", "--seeds", "1"]) == 0
    printed = capsys.readouterr().out
    assert f"\n4 finished trainings in {tmp_path} are not shown\n" in printed
    assert "never began" not in printed
    assert "not corrected" not in printed
    assert main([*words, "--arms", "neumann", "sgd", "adamw", "--seeds", "2"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "6/6  finished before\n"
    assert "not shown" not in printed.out


def test_after_its_warm_up_neumann_is_itself(finished):
    _, comparison, _ = finished
    assert comparison.rows[0].warmup is None
    assert comparison.limits() == []


@pytest.mark.parametrize("command", ["compare", "sweep", "demo"])
def test_torchrun_is_refused(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([command, "--output", str(tmp_path / "x")]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"neumann: neumann {command} is one process")
    assert errors.count("\n") == 1
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("arms", ['"neumann"', "3", "[3]"])
def test_arms_in_a_file_are_a_list(arms, tmp_path, capsys):
    file = tmp_path / "c.toml"
    file.write_text(f"arms = {arms}")
    assert main(["compare", "--config", str(file), "--output", str(tmp_path / "x")]) == 2
    errors = capsys.readouterr().err
    assert 'arms must be a list, as in ["neumann", "sgd"]; got ' in errors
    assert errors.count("\n") == 1


def test_a_long_path_does_not_make_a_name_too_long(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = fresh_folder(SweepConfig(data=f"folder:{'/ä' * 300}").title)
    folder.mkdir(parents=True)
    assert folder.name.endswith("-mlp-sweep-1")


def test_an_unfinished_comparison_can_be_read(tmp_path):
    with pytest.raises(Stop):
        compare(CompareConfig(arms=("sgd", "adamw"), seeds=2, epochs=1), tmp_path, StopAtFirst())
    found = read(tmp_path)
    assert found.missing == 3
    assert found.rows[1].difference.pairs == 0


# ---------------------------------------------------------------------- stopped from outside
