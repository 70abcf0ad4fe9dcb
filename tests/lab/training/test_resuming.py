"""State of other shapes than the parameter: an optimizer takes its own, and refuses another."""

from pathlib import Path

import pytest
import torch

from neumann.lab.optimizers.arms import Arm, build_optimizer
from neumann.lab.training.checkpoints import LoadedCheckpoint
from neumann.lab.training.resuming import check_optimizer

NOT_SQUARE = [torch.zeros(3, 4), torch.zeros(4, 4)]
LONG_SIDE = [[], torch.zeros(4, 4)]


def check(name, **changes):
    """Check the state of a hidden matrix (3, 4) after two steps and some changes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = build_optimizer(Arm.parse(name), model, steps_per_epoch=1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0] |= changes
    fresh = build_optimizer(Arm.parse(name), model, steps_per_epoch=1)
    check_optimizer(LoadedCheckpoint(2, {"optimizer": saved}, Path("2.pt"), []), fresh)


@pytest.mark.parametrize(
    ("name", "changes"), [("soap", {}), ("soap", {"GG": LONG_SIDE}), ("normuon", {})]
)
def test_its_own_state_is_taken(name, changes):
    check(name, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("soap", {"GG": NOT_SQUARE}, "GG of parameter 0 is a list"),
        ("soap", {"Q": [torch.zeros(3, 3)]}, "Q of parameter 0 is a list"),
        ("soap", {"Q": [torch.zeros(3, 3), "x"]}, "Q of parameter 0 is a list"),
        ("soap", {"Q": {}}, "Q of parameter 0 is a dict"),
        ("normuon", {"second_momentum_buffer": torch.zeros(4, 1)}, r"has the shape \(4, 1\)"),
    ],
)
def test_state_of_another_shape_is_refused(name, changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        check(name, **changes)
