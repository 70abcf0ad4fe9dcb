"""Warnings point at the user's line, however deep inside the library and torch they arise."""

import pytest
import torch
from torch import nn

import neumann
from neumann.optim.preconditioners import Spectral


def build(**options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    options |= {"steps_per_epoch": 1, "warmup_steps": 1}
    return model, neumann.Neumann(model.parameters(), lr=0.1, **options)


def train(model, optimizer):
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()


def step_without_gradients(model, optimizer):
    optimizer.step()


def step_with_cycled_momentum(model, optimizer):
    optimizer.param_groups[0]["max_momentum"] = 0.9
    train(model, optimizer)


def write_weights_between_steps(model, optimizer):
    train(model, optimizer)
    with torch.no_grad():
        model.bias.zero_()
    optimizer.step()


def save_displaced_weights(model, optimizer):
    for _ in range(3):
        train(model, optimizer)
    neumann.guard(model, optimizer)
    nn.Sequential(model).state_dict()


def load_other_preconditioner(model, optimizer):
    _, other = build(precondition=Spectral(scale=0.5))
    other.load_state_dict(build(precondition=Spectral(scale=1.0))[1].state_dict())


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (step_without_gradients, "found no gradient at all"),
        (step_with_cycled_momentum, "a scheduler cycles the momentum"),
        (write_weights_between_steps, "was changed between two steps"),
        (save_displaced_weights, "will hold the displaced weights"),
        (load_other_preconditioner, "was saved with the preconditioner"),
    ],
)
def test_the_line_that_led_to_it(act, message):
    with pytest.warns(UserWarning, match=message) as caught:
        act(*build())
    assert {warning.filename for warning in caught} == {__file__}
