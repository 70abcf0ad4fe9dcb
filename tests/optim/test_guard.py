"""The guard: loud when displaced weights leave as a model, silent everywhere else."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import neumann
from neumann import Neumann

WARNING = "this state dict will hold the displaced weights"


def build(steps=6, **options):
    """Past the warm-up, unless fewer steps are asked for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = Neumann(model.named_parameters(), lr=0.1, warmup_steps=2, reset_steps=4, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def is_silent(call):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()


def test_it_warns_once_and_names_the_remedies():
    model, optimizer = build()
    neumann.guard(model, optimizer)
    with pytest.warns(UserWarning, match=WARNING) as caught:
        model.state_dict()
    text = str(caught[0].message)
    assert "optimizer.evaluating()" in text
    assert "optimizer.checkpointing()" in text
    assert len(caught) == 1
    assert caught[0].filename == __file__
    is_silent(model.state_dict)


@pytest.mark.parametrize("part", ["wrapper", "layer"])
def test_wrappers_and_parts_are_guarded_too(part):
    model, optimizer = build()
    neumann.guard(model, optimizer)
    wrapped = nn.ModuleDict({"module": model}) if part == "wrapper" else model[2]
    with pytest.warns(UserWarning, match=WARNING):
        wrapped.state_dict()


def test_a_guard_on_the_wrapper_guards_the_model():
    model, optimizer = build()
    neumann.guard(nn.ModuleDict({"module": model}), optimizer)
    with pytest.warns(UserWarning, match=WARNING):
        model.state_dict()


def test_it_is_silent_where_nothing_is_wrong():
    model, optimizer = build()
    neumann.guard(model, optimizer)
    with optimizer.checkpointing():
        is_silent(model.state_dict)
        with optimizer.checkpointing():
            pass
        is_silent(model.state_dict)
    with optimizer.evaluating():
        is_silent(model.state_dict)
    is_silent(model[1].state_dict)  # holds no weights
    with pytest.warns(UserWarning, match=WARNING):
        model.state_dict()


def test_in_the_warm_up_the_weights_are_those_to_evaluate():
    model, optimizer = build(steps=2)
    neumann.guard(model, optimizer)
    is_silent(model.state_dict)


def test_checkpointing_ends_with_an_exception():
    model, optimizer = build()
    neumann.guard(model, optimizer)
    with pytest.raises(KeyError), optimizer.checkpointing():
        raise KeyError
    with pytest.warns(UserWarning, match=WARNING):
        model.state_dict()


def test_it_can_be_removed():
    model, optimizer = build()
    neumann.guard(model, optimizer).remove()
    is_silent(model.state_dict)


def test_copies_and_pickles_of_the_model_are_not_guarded():
    model, optimizer = build()
    neumann.guard(model, optimizer)
    is_silent(copy.deepcopy(model).state_dict)
    is_silent(pickle.loads(pickle.dumps(model)).state_dict)


def test_it_does_not_keep_the_optimizer_alive():
    model, optimizer = build()
    neumann.guard(model, optimizer)
    del optimizer
    is_silent(model.state_dict)


def test_a_model_without_the_parameters_is_refused():
    _, optimizer = build()
    with pytest.raises(ValueError, match="none of the optimizer's parameters"):
        neumann.guard(nn.Linear(2, 2), optimizer)


class Wrapper:
    """As trainers wrap an optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_a_wrapped_optimizer_is_unwrapped():
    model, optimizer = build()
    neumann.guard(model, Wrapper(optimizer))
    with pytest.warns(UserWarning, match=WARNING):
        model.state_dict()


def test_another_optimizer_is_refused():
    model, _ = build()
    with pytest.raises(TypeError, match="must be or wrap a Neumann, got SGD"):
        neumann.guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
