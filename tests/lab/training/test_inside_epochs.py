"""Evaluations and checkpoints inside an epoch, which for text may be a whole run."""

import dataclasses
import itertools
import math
import os
import re
import signal

import pytest
import torch
from torch import nn

from neumann.lab.commands import progress
from neumann.lab.commands.progress import show_training
from neumann.lab.config import TrainConfig
from neumann.lab.errors import UsageError
from neumann.lab.models.build import MODELS, Entry
from neumann.lab.report.runs import read_run
from neumann.lab.storage.reading import METRICS, RecordsError, read_metrics
from neumann.lab.storage.run_files import read_run_files
from neumann.lab.training.checkpoints import Checkpoints
from neumann.lab.training.evaluation import Score
from neumann.lab.training.learner import Learner
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process
from neumann.lab.training.records import CHECKPOINTS, Diverged
from neumann.lab.training.signals import Interrupted

EPOCH = 4  # steps
TIMES = ("seconds", "compile_seconds")


def configure(**changes):
    given = {"data": "synthetic:4,2,64", "opt": "neumann", "batch_size": 16, "epochs": 3}
    return TrainConfig(**{**given, "log_every": 1, "resume": "auto", **changes}).resolve()


def train(folder, observe=lambda line: None, **changes):
    training = Training(configure(**changes), Process())
    return training, training.run(folder, observe)


def read_lines(folder, *kinds):
    """Without times, which no two runs share."""
    return [
        {key: value for key, value in line.items() if key not in TIMES}
        for line in read_metrics(folder)
        if line["kind"] in (kinds or (line["kind"],))
    ]


@pytest.fixture
def normalized(monkeypatch):
    """A model whose evaluation could leave traces: running statistics and random numbers."""

    def build(shape, classes):
        layers = nn.Linear(shape[0], 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, classes)
        return nn.Sequential(*layers)

    monkeypatch.setitem(MODELS, "normalized", Entry(build, ("vector",)))
    return "normalized"


def test_a_run_is_evaluated_inside_epochs_and_trains_as_before(tmp_path, normalized):
    watched, summary = train(tmp_path / "watched", model=normalized, eval_steps=3)
    plain, expected = train(tmp_path / "plain", model=normalized)
    found = read_lines(tmp_path / "watched", "evaluation")
    assert [line["step"] for line in found] == [3, 6, 9]  # 12 ends an epoch
    assert [line["epoch"] for line in found] == [0.75, 1.5, 2.25]
    assert all(line["accuracy_recalibrated"] is not None for line in found)
    others = [line for line in read_lines(tmp_path / "watched") if line["kind"] != "evaluation"]
    assert others == read_lines(tmp_path / "plain")
    same = dict.fromkeys(TIMES, 0.0)
    assert dataclasses.replace(summary, **same) == dataclasses.replace(expected, **same)
    states = (each.learner.model.state_dict() for each in (watched, plain))
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_schedule_free_weights_are_not_rounded_by_an_evaluation(tmp_path):
    """It computes them back from those it evaluates."""
    pytest.importorskip("schedulefree")
    given = {"opt": "schedulefree", "sched": "constant", "epochs": 8}
    watched, _ = train(tmp_path / "watched", **given, eval_steps=1)
    plain, _ = train(tmp_path / "plain", **given, eval_every=8)
    states = (each.learner.model.state_dict() for each in (watched, plain))
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_an_evaluation_that_overflows_does_not_end_a_run(tmp_path, monkeypatch):
    scores = itertools.chain([Score(math.inf, 0.0, 1)], itertools.repeat(Score(1.0, 50.0, 1)))
    monkeypatch.setattr(Learner, "evaluate", lambda learner: (next(scores), None))
    _, summary = train(tmp_path, eval_steps=3)
    assert summary.loss == 1.0
    assert next(line["loss"] for line in read_lines(tmp_path, "evaluation")) == math.inf


def test_saving_inside_epochs_may_begin_when_a_run_is_resumed(tmp_path):
    def stop(line):
        if line["kind"] == "step" and line["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(tmp_path, stop)
    _, summary = train(tmp_path, checkpoint_steps=1)
    assert summary.steps == 3 * EPOCH


def test_the_target_is_noticed_at_the_step_that_reaches_it(tmp_path):
    train(tmp_path / "first", opt="sgd", eval_steps=1)
    series = read_run(tmp_path / "first").series("epoch", "accuracy")
    target = series[2]
    step = next(step for step, accuracy in series.items() if accuracy >= target)
    assert step <= 2
    _, summary = train(tmp_path / "second", opt="sgd", eval_steps=1, target=target)
    assert (summary.steps_to_target, summary.epochs_to_target) == (step, step / EPOCH)


@pytest.mark.parametrize("last", [2, 3, 5, 6])
def test_a_resumed_run_has_the_same_evaluations(tmp_path, last):
    def stop(line):
        if line["kind"] == "step" and line["step"] == last:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match=f"after step {last}"):
        train(tmp_path / "stopped", stop, eval_steps=3)
    train(tmp_path / "stopped", eval_steps=3)
    train(tmp_path / "whole", eval_steps=3)
    assert read_lines(tmp_path / "stopped") == read_lines(tmp_path / "whole")


def test_a_run_that_dies_in_its_first_epoch_continues_from_inside_it(tmp_path):
    def die(line):
        if line["step"] == 3:
            raise MemoryError

    with pytest.raises(MemoryError):
        train(tmp_path / "died", die, checkpoint_steps=2)
    assert Checkpoints(tmp_path / "died" / CHECKPOINTS).list_steps() == [2]
    continued, _ = train(tmp_path / "died", checkpoint_steps=2)
    whole, _ = train(tmp_path / "whole")
    assert read_lines(tmp_path / "died") == read_lines(tmp_path / "whole")
    states = (each.learner.model.state_dict() for each in (continued, whole))
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_a_report_shows_the_evaluations_inside_epochs(tmp_path):
    train(tmp_path, eval_steps=3)
    series = read_run(tmp_path).series("epoch", "accuracy")
    assert list(series) == [3, 4, 6, 8, 9, 12]


def test_a_missing_evaluation_is_damage(tmp_path):
    train(tmp_path, eval_steps=3)
    path = tmp_path / METRICS
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"step": 6' not in line or "train" in line))
    with pytest.raises(RecordsError, match="lacks the evaluation line of step 6"):
        read_run_files(tmp_path)


def test_a_run_that_diverges_keeps_its_evaluations(tmp_path):
    with pytest.raises(Diverged):
        train(tmp_path, opt="sgd", lr=1e30, eval_steps=1)
    assert read_run_files(tmp_path).summary.keys() == {"diverged"}


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_shows_evaluations_inside_epochs(tmp_path, is_terminal, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR" if is_terminal else "NO_COLOR", "1")
    training = Training(configure(eval_steps=3), Process())
    with show_training(training.learner) as observe:
        training.run(tmp_path, observe)
    shown = capsys.readouterr().err
    assert "epoch 3" in shown
    if not is_terminal:
        assert re.search(r"^epoch 0\.75/3  accuracy \d", shown, re.MULTILINE), shown


def test_a_long_epoch_is_logged_every_half_minute(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    training = Training(configure(epochs=1), Process())
    with show_training(training.learner) as observe:
        training.run(tmp_path, observe)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["0.25/1", "0.50/1", "0.75/1", "1.00/1", "1/1"]


@pytest.mark.parametrize("name", ["eval_steps", "checkpoint_steps"])
def test_steps_are_not_negative(name):
    with pytest.raises(UsageError, match="must be at least 0, got -1"):
        configure(**{name: -1})
