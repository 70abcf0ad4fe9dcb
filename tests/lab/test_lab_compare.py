"""Comparisons: paired, resumable, and honest about what diverged."""

import io
import os

import pytest
import torch
from rich.console import Console

from neumann.cli import main
from neumann.lab.checkpoints import Checkpoints
from neumann.lab.compare import compare
from neumann.lab.comparison import read, run_folder
from neumann.lab.config import CompareConfig
from neumann.lab.errors import UsageError
from neumann.lab.reading import read_metrics
from neumann.lab.tables import table

SMALL = CompareConfig(
    arms=("neumann:warmup_epochs=1", "sgd", "sgd:lr=1e30"), seeds=2, epochs=2, target=50.0
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    ended = []
    comparison = compare(SMALL, folder, done=lambda arm, seed: ended.append((arm, seed)))
    return folder, comparison, ended


def test_every_training_is_done_seed_by_seed(finished):
    _, _, ended = finished
    assert ended == [(arm, seed) for seed in range(2) for arm in SMALL.arms]


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
    """The first training is there already, the second was begun."""

    class Stop(Exception):
        pass

    def stop(arm, seed):
        raise Stop

    config = CompareConfig(arms=SMALL.arms[:2], seeds=1, epochs=2, target=50.0)
    with pytest.raises(Stop):
        compare(config, tmp_path, done=stop)
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
    ],
)
def test_bad_comparisons_are_refused_before_anything_is_trained(settings, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        compare(CompareConfig(**settings), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_command(tmp_path, capsys):
    words = ["compare", "--arms", "sgd", "adamw:lr=2e-3", "--seeds", "1", "--epochs", "1"]
    assert main([*words, "--output", str(tmp_path / "x")]) == 0
    printed = capsys.readouterr()
    assert "adamw:lr=2e-3" in printed.out
    assert "2/2" in printed.err
    assert main(["compar"]) == 2
    assert "the nearest: compare" in capsys.readouterr().err


def test_seeds_and_arms_can_be_added_but_settings_not_changed(tmp_path):
    config = CompareConfig(arms=("sgd",), seeds=1, epochs=1)
    compare(config, tmp_path)
    more = CompareConfig(arms=("sgd", "adamw"), seeds=2, epochs=1)
    ended = []
    compare(more, tmp_path, done=lambda arm, seed: ended.append((arm, seed)))
    assert ended[0] == ("sgd", 0)  # was there
    assert read(tmp_path).missing == 0
    with pytest.raises(UsageError, match="other settings: epochs is 1 there, 2 here"):
        compare(CompareConfig(arms=("sgd",), seeds=1, epochs=2), tmp_path)
    assert len(read(tmp_path).rows) == 2


def test_an_unfinished_comparison_can_be_read(tmp_path):
    class Stop(Exception):
        pass

    def stop(arm, seed):
        raise Stop

    with pytest.raises(Stop):
        compare(CompareConfig(arms=("sgd", "adamw"), seeds=2, epochs=1), tmp_path, done=stop)
    found = read(tmp_path)
    assert found.missing == 3
    assert found.rows[1].difference.pairs == 0
