"""Ctrl-C while the parameters change between w and w − μm: never a mixture, never a lost w."""

import copy

import pytest
import torch
from torch import nn

from neumann import Neumann
from neumann.optim import modes
from tests.support.interrupts import count_positions, interrupt_at
from tests.support.small_model import equal, weights

pytestmark = pytest.mark.slow


def build():
    """Two groups and a frozen one after five steps; w and w − μm of each parameter."""
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(n, dtype=torch.float64) for n in (3, 2, 2)])
    model[2].requires_grad_(False)
    groups = [{"params": [p]} for p in model]
    optimizer = Neumann(groups, lr=0.1, warmup_steps=1, reset_steps=3, foreach=False)
    train(model, optimizer, 5)
    return model, optimizer, weights(model), [p.clone() for p in optimizer.eval_params()]


def train(model, optimizer, steps):
    for _ in range(steps):
        for p in model[:2]:
            p.grad = p.detach() + 1
        optimizer.step()


def enter_and_leave(optimizer):
    with optimizer.evaluating():
        pass


def flags(optimizer):
    return {group["training"] for group in optimizer.param_groups}


def check(model, optimizer, displaced, corrected):
    """Wholly in one mode, the one that `training` says; and w comes back."""
    assert torch.is_grad_enabled()
    assert flags(optimizer) == {optimizer.training}
    assert equal(weights(model), displaced if optimizer.training else corrected)
    optimizer.train()
    assert flags(optimizer) == {True}
    assert equal(weights(model), displaced)
    assert all("weights" not in state for state in optimizer.state.values())


@pytest.mark.parametrize(
    ("starts_in_training", "operation"),
    [
        (False, Neumann.train),
        (True, Neumann.eval),
        (True, enter_and_leave),
        (False, enter_and_leave),
    ],
    ids=["train", "eval", "evaluating", "evaluating in evaluation mode"],
)
def test_an_interrupt_at_any_position_leaves_one_mode(starts_in_training, operation):
    model, optimizer, displaced, corrected = build()
    optimizer.train(starts_in_training)
    positions = count_positions(operation, optimizer)
    assert positions > 50
    for position in range(1, positions + 1):
        optimizer.train(starts_in_training)
        assert interrupt_at(position, operation, optimizer)
        if operation is enter_and_leave:
            assert optimizer.training is starts_in_training, position
        check(model, optimizer, displaced, corrected)
    optimizer.eval()
    assert equal(weights(model), corrected)


@pytest.mark.parametrize("finish", [Neumann.train, Neumann.eval])
@pytest.mark.parametrize(("start", "calls"), [(True, 6), (False, 4)])
def test_a_switch_cut_short_again_and_again_is_finished_by_the_next_call(
    start, calls, finish, monkeypatch
):
    """Each interrupt hits the repair of the one before; a state dict of that moment still has w."""
    real = modes.local_part
    for allowed in range(calls):
        model, optimizer, displaced, corrected = build()
        optimizer.train(start)
        left = iter(range(allowed))

        def interrupted(tensor, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return real(tensor)

        with monkeypatch.context() as patch:
            patch.setattr(modes, "local_part", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.train(not start)
        assert len(flags(optimizer)) == 1
        assert not optimizer.training
        with pytest.raises(RuntimeError, match="evaluation mode"):
            optimizer.step()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        other_model, other, *_ = build()
        other_model.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
        other.train()
        assert equal(weights(other_model), displaced)
        twin = finish(copy.deepcopy(optimizer))
        found = [p.detach() for group in twin.param_groups for p in group["params"]]
        assert equal(found, displaced if twin.training else corrected)
        finish(optimizer)
        assert optimizer.training is (finish is Neumann.train)
        check(model, optimizer, displaced, corrected)


def test_an_interrupted_switch_does_not_look_like_a_change_by_others(recwarn):
    model, optimizer, *_ = build()
    positions = count_positions(optimizer.eval)
    optimizer.train()
    for position in range(1, positions + 1, 7):
        interrupt_at(position, optimizer.eval)
        optimizer.train()
        train(model, optimizer, 1)
    assert not recwarn.list
