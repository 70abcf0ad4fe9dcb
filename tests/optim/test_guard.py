"""The guard: loud when weights are saved or loaded in the wrong mode, silent everywhere else."""

import copy
import functools
import pickle
import warnings

import pytest
import torch
from torch import nn

import neumann
from neumann import Neumann

LOST = "the weights that the model loaded in evaluation mode are gone"
DISPLACED = "the optimizer has now subtracted μm"
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


def test_it_warns_once_for_each_line_that_saves():
    """One that keeps an average of the weights must not use up the warning for the others."""
    model, optimizer = build()
    neumann.guard(model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model.state_dict()
        assert len(caught) == 1
        model.state_dict()
    assert len(caught) == 2


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


# ---------------------------------------------------------------- loaded weights


def build_guarded(**options):
    """With the evaluation weights of an earlier step, as early stopping keeps them."""
    model, optimizer = build(**options)
    with optimizer.evaluating():
        best = copy.deepcopy(model.state_dict())
    train(model, optimizer)
    return model, optimizer, best, neumann.guard(model, optimizer)


def train(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()


FORMS = pytest.mark.parametrize("options", [{}, {"precondition": "spectral"}], ids=["paper", "P"])


@FORMS
@pytest.mark.parametrize("loaded_into", ["model", "part"])
def test_evaluating_weights_that_were_loaded_warns(options, loaded_into):
    model, optimizer, best, _ = build_guarded(**options)
    if loaded_into == "model":
        model.load_state_dict(best)
    else:
        model[2].load_state_dict({"weight": best["2.weight"], "bias": best["2.bias"]})
    with pytest.warns(UserWarning, match=DISPLACED) as caught:
        optimizer.eval()
    assert caught[0].filename == __file__
    is_silent(optimizer.train)  # nothing was loaded since
    is_silent(optimizer.eval)  # judged once


@FORMS
def test_weights_loaded_in_evaluation_mode_are_reported_when_they_are_lost(options):
    model, optimizer, best, _ = build_guarded(**options)
    w = model[0].weight.detach().clone()
    with pytest.warns(UserWarning, match=LOST) as caught, optimizer.evaluating():
        model.load_state_dict(best)
    assert caught[0].filename == __file__
    assert torch.equal(model[0].weight, w)
    is_silent(optimizer.eval)


def test_the_switch_is_complete_when_the_warning_is_an_error():
    model, optimizer, best, _ = build_guarded()
    w = model[0].weight.detach().clone()
    optimizer.eval()
    model.load_state_dict(best)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=LOST):
            optimizer.train()
    assert optimizer.training
    assert torch.equal(model[0].weight, w)


def test_weights_swapped_in_evaluation_mode_and_put_back_are_not_lost():
    model, optimizer, best, _ = build_guarded()
    optimizer.eval()
    own = copy.deepcopy(model.state_dict())
    model.load_state_dict(best)
    model.load_state_dict(own)
    is_silent(optimizer.train)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_resuming_is_silent(order):
    model, optimizer, *_ = build_guarded()
    with optimizer.checkpointing():
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer)
    loads = [
        functools.partial(model.load_state_dict, saved[0]),
        functools.partial(optimizer.load_state_dict, saved[1]),
    ]
    for load in loads if order == "model first" else reversed(loads):
        load()
    is_silent(optimizer.eval)
    is_silent(optimizer.train)


def test_after_another_step_the_state_belongs_to_the_loaded_weights():
    model, optimizer, best, _ = build_guarded(precondition="spectral")
    model.load_state_dict(best)
    train(model, optimizer)
    is_silent(optimizer.eval)


def test_weights_loaded_before_the_first_step_or_in_the_warm_up_are_fine():
    for steps in (0, 2):
        model, optimizer = build(steps=steps)
        neumann.guard(model, optimizer)
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        is_silent(optimizer.eval)


def test_only_loads_of_the_optimizers_parameters_count():
    model, optimizer, best, _ = build_guarded()
    model.load_state_dict({}, strict=False)
    model.load_state_dict({"0.running_mean": best["0.bias"]}, strict=False)
    is_silent(optimizer.eval)
    optimizer.train()
    model.load_state_dict({"2.bias": best["2.bias"]}, strict=False)
    with pytest.warns(UserWarning, match=DISPLACED):
        optimizer.eval()


def test_a_group_that_is_added_after_a_load_does_not_hide_it():
    model, optimizer, best, _ = build_guarded()
    model.load_state_dict(best)
    optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(2)))]})
    with pytest.warns(UserWarning, match=DISPLACED):
        optimizer.eval()


def test_a_removed_guard_and_a_model_without_its_optimizer_load_in_silence():
    model, optimizer, best, guard = build_guarded()
    guard.remove()
    model.load_state_dict(best)
    is_silent(optimizer.eval)
    model, optimizer, best, _ = build_guarded()
    del optimizer
    is_silent(functools.partial(model.load_state_dict, best))
    is_silent(functools.partial(copy.deepcopy(model).load_state_dict, best))
