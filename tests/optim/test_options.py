"""Options: what is refused, before anything is changed, and epochs that become steps."""

import pytest
import torch
from torch import nn

from neumann import Neumann
from tests.support.small_model import CLOCK, equal, model_and_optimizer, train, weights


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, r"lr must be .* got -0\.1"),
        ({"lr": float("nan")}, "lr must be .* got nan"),
        ({"lr": float("inf")}, "lr must be .* got inf"),
        ({"lr": "0.1"}, r"lr must be .* got '0\.1'"),
        ({"lr": torch.tensor(-1.0)}, "lr must be .* got tensor"),
        ({"lr": torch.ones(2)}, "lr must be .* got tensor"),
        ({"average": 1.0}, r"average must be in \[0, 1\), got 1\.0"),
        ({"average": -0.1}, "average must be"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1\.0"),
        ({"momentum": -0.5}, "momentum must be"),
        ({"momentum": float("nan")}, "momentum must be"),
        ({"reset_growth": 0.5}, r"reset_growth must be at least 1, got 0\.5"),
        ({"reset_growth": float("inf")}, "reset_growth must be"),
        ({"cubic": -1e-7}, "cubic must be"),
        ({"repulsive": float("nan")}, "repulsive must be"),
        ({"weight_decay": -1}, "weight_decay must be .* got -1"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be .* got 0"),
        ({"steps_per_epoch": float("nan")}, "steps_per_epoch must be"),
        ({"warmup_steps": -1}, "warmup_steps must be .* got -1"),
        ({"warmup_steps": 2.5}, r"warmup_steps must be .* got 2\.5"),
        ({"reset_steps": -1}, "reset_steps must be"),
        ({"warmup_steps": None, "steps_per_epoch": 5, "warmup_epochs": -1}, "warmup_epochs must"),
        ({"reset_steps": 1, "reset_growth": 1.0}, "never move"),
        ({"variables": "scalars"}, "variables must be .* got 'scalars'"),
        ({"variables": 0}, "variables must be .* got 0"),
        ({"variables": True}, "variables must be .* got True"),
        ({"state_dtype": torch.int8}, "state_dtype must be None, torch.bfloat16"),
        ({"bounded": "no"}, "bounded must be True or False, got 'no'"),
        ({"foreach": "yes"}, "foreach must be None, True or False"),
        ({"warmup_epochs": float("nan")}, "warmup_epochs must be"),
        ({"reset_epochs": -3}, "reset_epochs must be .* got -3"),
        ({"precondition": "spectrall"}, "precondition must be None"),
        ({"foreach": True, "differentiable": True}, "cannot be combined"),
        ({"foreach": True, "fused": True}, "cannot be combined"),
        ({"differentiable": True, "fused": True}, "cannot be combined"),
    ],
)
def test_bad_options(options, message):
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=message):
        Neumann([p], **{"lr": 0.1, **CLOCK, **options})
    assert torch.equal(p, torch.ones(2))


@pytest.mark.parametrize(
    ("clock", "message"),
    [
        ({}, "pass steps_per_epoch=len"),
        ({"warmup_steps": 5}, "reset_steps is None and so is steps_per_epoch"),
        ({"reset_steps": 5}, "warmup_steps is None and so is steps_per_epoch"),
    ],
)
def test_a_missing_clock_says_what_to_pass(clock, message):
    with pytest.raises(ValueError, match=message):
        Neumann([nn.Parameter(torch.ones(2))], lr=0.1, **clock)


@pytest.mark.parametrize(
    ("clock", "expected"),
    [
        ({"steps_per_epoch": 7}, (35, 70)),
        ({"steps_per_epoch": 7, "warmup_steps": 3}, (3, 70)),
        ({"steps_per_epoch": 7, "reset_steps": 0}, (35, 0)),
        ({"steps_per_epoch": 5, "warmup_epochs": 0.5, "reset_epochs": 0.1}, (3, 1)),
        ({"steps_per_epoch": 5, "warmup_epochs": 0.1, "reset_epochs": 0.01}, (1, 1)),
        ({"steps_per_epoch": 5, "warmup_epochs": 0, "reset_epochs": 0}, (0, 0)),
    ],
)
def test_epochs_become_steps_rounded_half_up(clock, expected):
    optimizer = Neumann([nn.Parameter(torch.ones(2))], lr=0.1, **clock)
    group = optimizer.param_groups[0]
    assert (group["warmup_steps"], group["reset_steps"]) == expected


def test_missing_and_repeated_parameters_are_refused():
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="empty parameter list"):
        Neumann([], lr=0.1, **CLOCK)
    with pytest.raises(ValueError, match="params must hold at least one"):
        Neumann([{"params": []}], lr=0.1, **CLOCK)
    with pytest.raises(ValueError, match="same parameter twice: number 1"):
        Neumann([p, p], lr=0.1, **CLOCK)
    with pytest.raises(ValueError, match="same parameter twice: 'y'"):
        Neumann([("x", p), ("y", p)], lr=0.1, **CLOCK)
    groups = [{"params": nn.Linear(2, 2).named_parameters()} for _ in "ab"]
    with pytest.raises(ValueError, match="two parameters 'weight': names must differ"):
        Neumann(groups, lr=0.1, **CLOCK)
    with pytest.raises(ValueError, match=r"conjugate view, number 0, .* pass its resolve_conj"):
        Neumann([nn.Parameter(torch.ones(2, dtype=torch.complex64).conj())], lr=0.1, **CLOCK)
    with pytest.raises(ValueError, match=r"expanded tensor, number 1, .* pass the tensor that it"):
        Neumann([p, nn.Parameter(torch.zeros(1).expand(5))], lr=0.1, **CLOCK)
    with pytest.raises(ValueError, match="more than one parameter group"):
        Neumann([{"params": [p]}, {"params": [p]}], lr=0.1, **CLOCK)
    with pytest.raises(TypeError, match="must be a dict"):
        Neumann([p], lr=0.1, **CLOCK).add_param_group([p])


def test_a_group_cannot_have_its_own_epochs():
    groups = [{"params": [nn.Parameter(torch.ones(2))], "warmup_epochs": 2}]
    with pytest.raises(ValueError, match=r"warmup_epochs=2 .* pass it to Neumann"):
        Neumann(groups, lr=0.1, steps_per_epoch=5)


def test_a_bad_value_in_any_group_stops_before_the_weights():
    model, _ = model_and_optimizer()
    optimizer = Neumann([{"params": [p]} for p in model.parameters()], lr=0.1, **CLOCK)
    optimizer.param_groups[3]["lr"] = -1.0
    before = weights(model)
    with pytest.raises(ValueError, match="lr must be"):
        train(model, optimizer, 1)
    assert equal(before, weights(model))


@pytest.mark.parametrize(
    ("name", "value"), [("lr", -1.0), ("lr", float("nan")), ("momentum", 1.5), ("weight_decay", -1)]
)
def test_a_bad_value_set_later_stops_before_the_weights(name, value):
    model, optimizer = model_and_optimizer()
    train(model, optimizer, 5)
    before = weights(model)
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=f"{name} must be"):
        train(model, optimizer, 1)
    assert equal(before, weights(model))
    assert optimizer.diagnostics().step == 5
