"""--clip-grad: the norm of a step's whole gradient, whatever the step is divided into."""

import contextlib
import dataclasses

import pytest
import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy

from neumann.lab.config import TrainConfig
from neumann.lab.storage.reading import read_metrics
from neumann.lab.training.checkpoints import Checkpoints
from neumann.lab.training.gradients import GradientComputer
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process

# A gradient of the digits has a norm of about 0.5 at first, so that this clips every step.
CONFIG = TrainConfig(
    opt="sgd", lr=0.5, batch_size=256, epochs=2, log_every=1, clip_grad=0.05
).resolve()


def train(folder, **changes):
    several = distributed.is_initialized()
    ranks = (distributed.get_rank(), distributed.get_world_size()) if several else ()
    Training(dataclasses.replace(CONFIG, **changes), Process(*ranks)).run(folder)


def weights(folder):
    model = Checkpoints(folder / "checkpoints").load_latest().payload["model"]
    return torch.cat([value.flatten() for value in model.values()])


def losses(folder):
    return [line["train_loss"] for line in read_metrics(folder) if "train_loss" in line]


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_the_norm_of_the_accumulated_gradient(pieces, max_norm):
    torch.manual_seed(0)
    network = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(network.parameters())
    inputs, labels = torch.randn(16, 6), torch.randint(3, (16,))
    cross_entropy(network(inputs), labels).backward()
    whole = torch.cat([p.grad.flatten() for p in network.parameters()])
    computer = GradientComputer(
        network, optimizer, cross_entropy, contextlib.nullcontext, False, max_norm
    )
    computer.compute(list(zip(inputs.chunk(pieces), labels.chunk(pieces), strict=True)))
    found = torch.cat([p.grad.flatten() for p in network.parameters()])
    expected = whole * min(1.0, max_norm / whole.norm().item())
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-8)


def test_a_run_clips(tmp_path):
    """Five steps an epoch, each of at most lr × norm for SGD without momentum."""
    config = dataclasses.replace(CONFIG, opt="sgd:momentum=0,nesterov=false", sched="constant")
    training = Training(config, Process())
    before = torch.cat([p.detach().flatten() for p in training.learner.model.parameters()])
    training.run(tmp_path / "run")
    moved = torch.cat([p.detach().flatten() for p in training.learner.model.parameters()]) - before
    bound = 0.5 * 0.05 * training.learner.total_steps
    assert 0.1 * bound < moved.norm() <= bound * 1.0001
    train(tmp_path / "plain", clip_grad=None)
    assert losses(tmp_path / "run")[-1] > losses(tmp_path / "plain")[-1]


@pytest.mark.parametrize("changes", [{}, {"micro_batch_size": 64}, {"fsdp": True}])
def test_two_processes_clip_as_one(two, tmp_path, changes):
    train(tmp_path / "one")
    two.run(train, tmp_path / "two", **changes)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    difference = (weights(tmp_path / "two") - weights(tmp_path / "one")).abs().max()
    assert difference < 1e-5
