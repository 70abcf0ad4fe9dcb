"""Compilation in a process that trains several times: once for every batch size."""

import contextlib
import dataclasses

import pytest
import torch
from torch.nn.functional import cross_entropy

from neumann.lab.config import TrainConfig
from neumann.lab.training.gradients import GradientComputer
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]


def compilations():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_runs_share_one_compilation(tmp_path):
    """Another seed and another optimizer in the same process compile nothing."""
    config = TrainConfig(opt="sgd", epochs=1, batch_size=256, compile="on")
    first = Training(config.resolve(), Process()).run(tmp_path / "first")
    compiled = compilations()
    assert compiled >= 1
    other = dataclasses.replace(config, opt="adamw", seed=1)
    second = Training(other.resolve(), Process()).run(tmp_path / "second")
    assert compilations() == compiled
    assert second.compile_seconds < first.compile_seconds


@pytest.mark.slow
def test_every_batch_size_is_compiled_separately():
    """Not one for all sizes after the second, which would be slower."""
    network = torch.nn.Sequential(torch.nn.Linear(5, 3))
    optimizer = torch.optim.SGD(network.parameters())
    computer = GradientComputer(
        network, optimizer, cross_entropy, contextlib.nullcontext, compiled=True
    )
    for size in (8, 16, 24):
        computer.compute([(torch.ones(size, 5), torch.zeros(size, dtype=torch.long))])
    assert compilations() == 3
