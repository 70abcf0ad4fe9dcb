"""--ema: the average is what is evaluated, and it resumes with the same bits."""

import dataclasses
import os
import signal
import warnings

import pytest
import torch
from torch import distributed, nn

from neumann import Neumann
from neumann.lab.config import TrainConfig
from neumann.lab.errors import UsageError
from neumann.lab.storage.reading import read_metrics, read_summary
from neumann.lab.training.batchnorm_layers import get_statistics
from neumann.lab.training.checkpoints import CheckpointError, Checkpoints
from neumann.lab.training.learner import Learner
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process
from neumann.lab.training.signals import Interrupted
from neumann.lab.training.weight_average import WeightAverage

IMAGES = TrainConfig(
    data="synthetic:1x4x4,4,64",
    model="cnn",
    opt="neumann:warmup=2,reset=3",
    lr=0.05,
    ema=0.9,
    batch_size=16,
    epochs=2,
    log_every=2,
).resolve()


def train(folder, observe=lambda line: None, **changes):
    several = distributed.is_initialized()
    ranks = (distributed.get_rank(), distributed.get_world_size()) if several else ()
    training = Training(dataclasses.replace(IMAGES, **changes), Process(*ranks))
    return training, training.run(folder, observe)


def payload(folder):
    return Checkpoints(folder / "checkpoints").load_latest().payload


def scores(folder):
    return [
        {key: value for key, value in line.items() if key != "seconds"}
        for line in read_metrics(folder)
    ]


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


@pytest.mark.parametrize("kind", ["sgd", "neumann"])
def test_the_average_of_the_evaluation_weights(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    optimizer = (
        Neumann(model.parameters(), 0.1, warmup_steps=1, reset_steps=4)
        if kind == "neumann"
        else torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    )
    average = WeightAverage(model, optimizer, decay=0.5)

    def evaluated():
        with optimizer.evaluating() if kind == "neumann" else warnings.catch_warnings():
            return {k: v.clone() for k, v in model.state_dict().items() if "num" not in k}

    expected = evaluated()
    for step in range(1, 12):
        optimizer.zero_grad()
        model(torch.randn(8, 3).double()).square().sum().backward()
        optimizer.step()
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        now = evaluated()
        expected = {k: decay * expected[k] + (1 - decay) * now[k] for k in now}
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with average.in_place_of_weights(Process()):
        found = model.state_dict()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)
        assert not torch.equal(found["0.weight"], before["0.weight"])
    assert same(model.state_dict(), before)


def test_training_is_the_same_and_the_evaluation_another(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Neumann warns if something else writes its weights
        train(tmp_path / "average")
    train(tmp_path / "plain", ema=None)
    ours, theirs = payload(tmp_path / "average"), payload(tmp_path / "plain")
    assert same(ours["model"], theirs["model"])
    assert "average" not in theirs
    assert read_summary(tmp_path / "average")["loss"] != read_summary(tmp_path / "plain")["loss"]


def test_the_summary_is_that_of_the_saved_average(tmp_path):
    _, summary = train(tmp_path / "run")
    saved = payload(tmp_path / "run")
    fresh = Learner(dataclasses.replace(IMAGES, ema=None), Process())
    fresh.model.load_state_dict({**saved["model"], **saved["average"]})
    names = [n for n, b in fresh.model.named_buffers() if b.is_floating_point()]
    statistics = dict(zip(names, saved["processes"][0]["average_statistics"], strict=True))
    fresh.model.load_state_dict({**fresh.model.state_dict(), **statistics})
    score, recalibrated = fresh.evaluate()
    assert (score.loss, score.accuracy) == (summary.loss, summary.accuracy)
    assert recalibrated.accuracy == summary.accuracy_recalibrated


def stop_at(step):
    """An observer that sends one signal with the line of a step."""

    def observe(line):
        if line["kind"] == "step" and line["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return observe


@pytest.mark.parametrize("last", [2, 4, 6])
def test_a_run_resumes_with_the_same_bits(tmp_path, last):
    train(tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(tmp_path / "run", stop_at(last))
    train(tmp_path / "run", resume="auto")
    ours, theirs = payload(tmp_path / "run"), payload(tmp_path / "whole")
    assert same(ours["average"], theirs["average"])
    assert scores(tmp_path / "run") == scores(tmp_path / "whole")


def test_a_checkpoint_without_its_average_is_refused(tmp_path):
    with pytest.raises(Interrupted):
        train(tmp_path / "run", stop_at(2))
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    found = checkpoints.load_latest()
    del found.payload["average"]
    checkpoints.save(found.step, found.payload)
    with pytest.raises(CheckpointError, match=r"does not fit this run .*average"):
        train(tmp_path / "run", resume="auto")


@pytest.mark.parametrize("changes", [{}, {"fsdp": True}])
def test_two_processes_have_the_average_of_one(two, tmp_path, changes):
    """Each normalizes its 8 examples, as ghost batches of 8 do in one process."""
    train(tmp_path / "one", bn_batch=8)
    two.run(evaluated_by_two, tmp_path / "two", **changes)
    ours, theirs = payload(tmp_path / "two")["average"], payload(tmp_path / "one")["average"]
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4)
    one, both = (read_summary(tmp_path / name) for name in ("one", "two"))
    assert both["loss"] == pytest.approx(one["loss"], rel=1e-2)


def evaluated_by_two(folder, **changes):
    train(folder, **changes)


def test_processes_evaluate_the_mean_of_their_running_statistics(two, tmp_path):
    (ours, theirs), held = zip(*two.run(running_statistics, tmp_path), strict=True)
    assert not torch.equal(ours, theirs)
    for each in held:
        torch.testing.assert_close(each, (ours + theirs) / 2)


def running_statistics(folder):
    """The process's own, and what it evaluates."""
    learner = train(folder)[0].learner
    with learner.average.in_place_of_weights(learner.process):
        held = [s.flatten() for s in get_statistics(learner.model) if s.is_floating_point()]
        return torch.cat(learner.average.get_statistics()), torch.cat(held)


@pytest.mark.parametrize("changes", [{}, {"fsdp": True}])
def test_two_processes_resume_their_average(two, tmp_path, changes):
    two.run(evaluated_by_two, tmp_path / "whole", **changes)
    two.run(interrupted_once, tmp_path / "run", **changes)
    ours, theirs = payload(tmp_path / "run"), payload(tmp_path / "whole")
    assert same(ours["average"], theirs["average"])
    assert scores(tmp_path / "run") == scores(tmp_path / "whole")


def interrupted_once(folder, **changes):
    with pytest.raises(BaseException, match="stopped by SIGTERM"):
        train(folder, stop_at(6), resume="auto", **changes)  # only the leader is called
    train(folder, resume="auto", **changes)


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5, float("nan")])
def test_a_decay_that_is_none(decay):
    with pytest.raises(UsageError, match="--ema must be a decay between 0 and 1"):
        TrainConfig(ema=decay).resolve()


def test_an_optimizer_with_an_average_of_its_own():
    config = TrainConfig(opt="schedulefree", ema=0.99).resolve()
    with pytest.raises(UsageError, match="--ema: AdamWScheduleFree evaluates an average"):
        Learner(config, Process())
