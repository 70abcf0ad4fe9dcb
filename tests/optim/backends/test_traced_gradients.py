"""Compiled steps whose gradients are missing, not finite or scaled."""

import copy

import torch
from torch import nn

from tests.support.compiled import (
    MARKS,
    Compiled,
    difference,
    give_gradients,
    go,
    make,
    parameters,
    refused,
    whole,
)

pytestmark = MARKS


def test_parameters_without_a_gradient():
    ours, reference = make(), make()
    compiled = Compiled(ours.step)
    for optimizer, step in ((ours, compiled), (reference, reference.step)):
        go(optimizer, step, 6)
        go(optimizer, step, 5, start=6, missing=(0,))  # over the reset at t = 5
    assert whole(compiled, 2)
    assert difference(ours, reference) < 1e-13
    assert not ours.state[parameters(ours)[0]]["iterate"].any()


def test_freezing_a_parameter_ends_its_series():
    """In the next step, before any reset; so w − μm = w there."""
    ours, reference = make(reset_steps=0), make(reset_steps=0)
    compiled = Compiled(ours.step)
    for optimizer, step in ((ours, compiled), (reference, reference.step)):
        go(optimizer, step, 6)
        assert optimizer.state[parameters(optimizer)[0]]["iterate"].any()
        parameters(optimizer)[0].requires_grad_(False)
        go(optimizer, step, 1, start=6, missing=(0,))
        assert not optimizer.state[parameters(optimizer)[0]]["iterate"].any()
    assert whole(compiled, 2)
    assert difference(ours, reference) < 1e-13


def test_a_frozen_parameter_needs_one_eager_step_when_it_thaws():
    ours, reference = make(), make()
    compiled = Compiled(ours.step)
    for optimizer in (ours, reference):
        late = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
        optimizer.add_param_group({"params": [late]})
    for optimizer, step in ((ours, compiled), (reference, reference.step)):
        go(optimizer, step, 5, missing=(2,))
        parameters(optimizer)[2].requires_grad_(True)
    refused(ours, "parameter 0 of group 2 was frozen until now")
    for optimizer, step in ((ours, compiled), (reference, reference.step)):
        go(optimizer, optimizer.step, 1, start=5)
        go(optimizer, step, 4, start=6)
    assert whole(compiled, 2)
    assert difference(ours, reference) < 1e-13


def test_a_nan_does_not_survive_a_reset():
    ours, reference = make(), make()
    compiled = Compiled(ours.step)
    for optimizer, step in ((ours, compiled), (reference, reference.step)):
        go(optimizer, step, 7)
        optimizer.state[parameters(optimizer)[0]]["iterate"][0] = float("nan")
        go(optimizer, step, 3, start=7)  # the first is the reset at t = 5
    assert difference(ours, reference) < 1e-13


def test_an_overflow_at_a_reset_moves_no_weight():
    ours = make()
    compiled = Compiled(ours.step)
    go(ours, compiled, 7)
    before = parameters(ours)[0].detach().clone()
    give_gradients(ours, 7)
    parameters(ours)[0].grad[1] = float("inf")
    compiled()
    assert ours.diagnostics().phase == "reset"
    assert torch.equal(parameters(ours)[0], before)


def test_skip_nonfinite():
    ours, reference = make(skip_nonfinite=True), make(skip_nonfinite=True)
    compiled = Compiled(ours.step)
    for step in range(12):
        for optimizer, call in ((ours, compiled), (reference, reference.step)):
            give_gradients(optimizer, step)
            if step in (1, 3, 8):  # in the warm-up, where a reset would be, and after it
                parameters(optimizer)[1].grad[0, 0] = float("nan")
            before = copy.deepcopy(optimizer.state_dict()["state"][0])
            call()
            if step in (1, 3, 8):
                after = optimizer.state_dict()["state"][0]
                assert all(
                    torch.equal(before[key], after[key]) for key in before if key != "skipped"
                )
    assert whole(compiled)
    assert difference(ours, reference) < 1e-13
    found = ours.diagnostics()
    assert (found.step, found.skipped) == (9, 3)


def test_grad_scale_and_found_inf():
    ours, reference = make(), make()
    compiled = Compiled(ours.step)
    ours.grad_scale, ours.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    for step in range(10):
        give_gradients(ours, step)
        for p in parameters(ours):
            p.grad.mul_(8)
        ours.found_inf.fill_(step in (2, 5))
        compiled()
        if step not in (2, 5):
            go(reference, reference.step, 1, step)
    assert whole(compiled)
    assert difference(ours, reference) < 1e-13
    assert ours.diagnostics().step == 8
