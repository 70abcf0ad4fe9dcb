"""What a resumed run publishes is that of the whole run: its time, its target, its dropout."""

import dataclasses
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from neumann.lab.config import TrainConfig
from neumann.lab.models.build import MODELS, Entry
from neumann.lab.storage.reading import read_metrics
from neumann.lab.training.checkpoints import Checkpoints
from neumann.lab.training.learner import Learner
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process
from neumann.lab.training.signals import Interrupted

EPOCH = 4  # steps
CONFIG = TrainConfig(
    data="synthetic:4,2,64", opt="sgd", batch_size=16, epochs=3, log_every=1, resume="auto"
).resolve()


def train(folder, config=CONFIG):
    return Training(config, Process()).run(folder)


def train_in_two_parts(folder, last, config=CONFIG):
    """Stop after a step, then resume."""

    def stop(line):
        if line["kind"] == "step" and line["step"] == last:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match=f"after step {last}"):
        Training(config, Process()).run(folder, stop)
    return train(folder, config)


@pytest.mark.parametrize("last", [EPOCH - 1, EPOCH, EPOCH + 1])
def test_the_seconds_of_a_resumed_run_are_those_of_all_its_steps(tmp_path, monkeypatch, last):
    steps = []  # each takes a second, and nothing else takes time

    def take_step(learner, pieces, take_step=Learner.take_step):
        loss = take_step(learner, pieces)
        steps.append(learner.step)
        return loss

    monkeypatch.setattr(Learner, "take_step", take_step)
    clock = SimpleNamespace(perf_counter=lambda: float(len(steps)))
    monkeypatch.setattr("neumann.lab.training.clock.time", clock)
    assert train_in_two_parts(tmp_path, last).seconds == len(steps) == 3 * EPOCH
    epochs = [line for line in read_metrics(tmp_path) if line["kind"] == "epoch"]
    assert [line["seconds"] for line in epochs] == [EPOCH, 2 * EPOCH, 3 * EPOCH]


def test_a_target_reached_before_a_stop_keeps_its_step(tmp_path):
    config = dataclasses.replace(CONFIG, target=0.0)
    summary = train_in_two_parts(tmp_path, EPOCH + 1, config)
    assert (summary.steps_to_target, summary.epochs_to_target) == (EPOCH, 1)


def with_dropout(shape, classes):
    return nn.Sequential(nn.Linear(shape[0], 8), nn.Dropout(), nn.Linear(8, classes))


def test_dropout_goes_on_as_if_the_run_had_not_stopped(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "dropout", Entry(with_dropout, ("vector",)))
    config = dataclasses.replace(CONFIG, model="dropout")
    train(tmp_path / "whole", config)
    train_in_two_parts(tmp_path / "stopped", EPOCH + 1, config)
    ours, theirs = (
        Checkpoints(tmp_path / name / "checkpoints").load_latest().payload["model"]
        for name in ("stopped", "whole")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
