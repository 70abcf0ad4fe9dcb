"""Arms that use a mini-batch several times: the same function each time, counted, resumable."""

import dataclasses
import os
import signal

import pytest
import torch
from torch import nn

from neumann.lab.commands.main import main
from neumann.lab.config import TrainConfig
from neumann.lab.errors import UsageError
from neumann.lab.models.build import MODELS, Entry
from neumann.lab.storage.reading import read_metrics, read_summary
from neumann.lab.training.checkpoints import Checkpoints
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process
from neumann.lab.training.records import Diverged
from neumann.lab.training.signals import Interrupted

DIGITS = TrainConfig(epochs=2, batch_size=256, log_every=2, device="cpu")


class Noisy(nn.Sequential):
    """BatchNorm and dropout: a function that repeats itself only if someone sees to it."""

    def __init__(self, shape, classes):
        super().__init__(
            nn.Flatten(),
            nn.Linear(8 * 8, 16),
            nn.BatchNorm1d(16),
            nn.Dropout(0.5),
            nn.ReLU(),
            nn.Linear(16, classes),
        )


def train(folder, config=DIGITS, **changes):
    config = dataclasses.replace(config, **changes).resolve()
    summary = Training(config, Process()).run(folder)
    return summary, Checkpoints(folder / "checkpoints").load_latest().payload["model"]


def furthest(ours, theirs):
    return max((ours[name] - theirs[name]).abs().max().item() for name in theirs)


@pytest.mark.parametrize("micro_batch_size", [None, 64])
def test_all_evaluations_of_a_step_see_the_same_function(tmp_path, monkeypatch, micro_batch_size):
    """With η_in = 0 the four gradients are one: a step with a quarter of the lr does the same."""
    monkeypatch.setitem(MODELS, "noisy", Entry(Noisy, ("image",)))
    noisy = dataclasses.replace(DIGITS, data="synthetic:1x8x8,4,512", model="noisy", flip=True)
    noisy = dataclasses.replace(noisy, micro_batch_size=micro_batch_size, weight_decay=0.01)
    few, ours = train(tmp_path / "few", noisy, opt="idealized:inner_steps=3,inner_lr=0,lr=0.05")
    one, theirs = train(tmp_path / "one", noisy, opt="idealized:inner_steps=0,lr=0.2")
    assert furthest(ours, theirs) < 1e-6
    assert few.loss == pytest.approx(one.loss, rel=1e-5)
    assert (few.gradients, one.gradients) == (4 * few.steps, one.steps)
    _, displaced = train(tmp_path / "far", noisy, opt="idealized:inner_steps=3,lr=0.05")
    assert furthest(displaced, theirs) > 1e-4


@pytest.mark.parametrize("opt", ["idealized:inner_steps=2,inner_lr=0.5", "cg"])
def test_running_statistics_are_those_of_the_weights_themselves(tmp_path, monkeypatch, opt):
    monkeypatch.setitem(MODELS, "noisy", Entry(Noisy, ("image",)))
    changes = {"data": "synthetic:1x8x8,4,256", "model": "noisy", "epochs": 1}
    _, ours = train(tmp_path / "ours", opt=opt, **changes)
    _, theirs = train(tmp_path / "sgd", opt="sgd", **changes)
    statistics = [name for name in theirs if "running" in name or "tracked" in name]
    assert len(statistics) == 3
    assert all(torch.equal(ours[name], theirs[name]) for name in statistics)
    assert furthest(ours, theirs) > 0


@pytest.mark.parametrize(
    ("opt", "most"), [("idealized:inner_steps=2", 0), ("cg:max_products=3", 3)]
)
def test_the_records_count_evaluations_also_of_a_resumed_run(tmp_path, opt, most):
    summary, weights = train(tmp_path / "whole", opt=opt)
    per_step = 1 if most else 3
    assert summary.steps == 10
    assert summary.gradients == 10 * per_step
    for line in read_metrics(tmp_path / "whole"):
        assert line["gradients"] == line["step"] * per_step
        assert ("products" in line) == bool(most)
    if most:
        assert 10 <= summary.products <= most * 10

    def stop(line):
        if line["step"] == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    config = dataclasses.replace(DIGITS, opt=opt).resolve()
    with pytest.raises(Interrupted):
        Training(config, Process()).run(tmp_path / "resumed", stop)
    again, same = train(tmp_path / "resumed", config, resume="auto")
    assert all(torch.equal(same[name], weights[name]) for name in weights)
    counted = [
        {k: v for k, v in read_summary(tmp_path / name).items() if k != "seconds"}
        for name in ("whole", "resumed")
    ]
    assert counted[0] == counted[1]
    assert again.gradients == counted[0]["gradients"]


@pytest.mark.parametrize("opt", ["idealized", "cg", "cg:curvature=hessian,damping=1"])
def test_micro_batches_change_nothing_without_batchnorm(tmp_path, opt):
    _, whole = train(tmp_path / "whole", opt=opt, epochs=1)
    _, parts = train(tmp_path / "parts", opt=opt, epochs=1, micro_batch_size=64)
    assert furthest(whole, parts) < 1e-3


def test_a_diverging_run_of_cg_ends_as_such(tmp_path):
    with pytest.raises(Diverged):
        train(tmp_path, opt="cg:lr=1e30")


def test_a_model_that_is_differentiable_once_is_refused_in_one_line(tmp_path, monkeypatch):
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, gradient):
            return gradient

    class Network(nn.Linear):
        def forward(self, x):
            return Once.apply(super().forward(x))

    entry = Entry(lambda shape, classes: Network(*shape, classes), ("vector",))
    monkeypatch.setitem(MODELS, "once", entry)
    with pytest.raises(UsageError, match=r"--opt cg: .*once_differentiable") as caught:
        train(tmp_path, opt="cg", model="once")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("opt", ["idealized", "cg"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--fsdp"], "--fsdp: {} does not support sharded weights"),
        (["--clip-grad", "1"], "--clip-grad: {} uses several gradients per step and cannot clip"),
    ],
)
def test_what_they_cannot_do_is_refused_before_anything_starts(
    opt, flags, message, tmp_path, capsys
):
    folder = tmp_path / "run"
    assert main(["train", "--opt", opt, *flags, "--output", str(folder)]) == 2
    assert message.format(opt) in capsys.readouterr().err
    assert not folder.exists()
