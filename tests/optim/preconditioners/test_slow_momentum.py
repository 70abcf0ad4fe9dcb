"""Slow momentum: its formula, where it begins, and that it survives a checkpoint."""

import copy

import pytest
import torch
from torch import nn

from neumann import Neumann
from neumann.optim.preconditioners import Momentum, SlowMomentum, Spectral
from tests.support.preconditioned import CLOCK, network, trained, weights


def test_the_formula():
    p = SlowMomentum(decay=0.8, slow=0.9, share=0.25, start=2)
    torch.manual_seed(0)
    given = torch.randn(6, 3, dtype=torch.float64)
    states = [p.create(given[0])]
    found = [p.apply([g], states)[0] for g in given]
    past = torch.zeros(3, dtype=torch.float64)
    for step, (g, direction) in enumerate(zip(given, found, strict=True)):
        past = 0.8 * past + g
        fast = g + 0.8 * past
        if step < 2:
            torch.testing.assert_close(direction, fast)
            continue
        powers = [0.9**age for age in range(step - 2, -1, -1)]  # of the gradients from step 2 on
        mean = sum(w * x for w, x in zip(powers, given[2 : step + 1], strict=True)) / sum(powers)
        torch.testing.assert_close(direction, 0.75 * fast + 0.25 * mean / 0.2)


def test_it_is_momentum_until_it_begins():
    p, usual = SlowMomentum(decay=0.8, start=3), Momentum(0.8)
    torch.manual_seed(0)
    states, usual_states = [p.create(torch.zeros(4))], [usual.create(torch.zeros(4))]
    for step in range(5):
        g = torch.randn(4)
        (found,), (fast,) = p.apply([g], states), usual.apply([g], usual_states)
        assert torch.equal(found, fast) == (step < 3), step


def test_under_steady_gradients_it_has_the_size_of_momentum():
    p, g = SlowMomentum(decay=0.8, slow=0.95, share=0.5), torch.ones(2, 2)
    states = [p.create(g)]
    for _ in range(60):
        (found,) = p.apply([g], states)
    torch.testing.assert_close(found, torch.full((2, 2), 5.0), rtol=1e-4, atol=0)


def test_every_parameter_counts_its_own_gradients():
    """One that gets its first gradient late begins late, as if it were alone."""
    p, g = SlowMomentum(start=2), torch.ones(2)
    early, late = p.create(g), p.create(g)
    for _ in range(4):
        p.apply([g], [early])
    alone = p.create(g)
    for k in range(1, 4):
        (_, found), (expected,) = p.apply([g, k * g], [early, late]), p.apply([k * g], [alone])
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("saved_after", [2, 7])
def test_a_resumed_run_has_the_same_bits(dtype, saved_after):
    chosen = Spectral(before=SlowMomentum(0.8, slow=0.9, share=0.6, start=4))
    options = {"precondition": chosen, "state_dtype": dtype}
    whole, _ = trained(12, **options)
    plain, _ = trained(12, precondition=Spectral(before=Momentum(0.8)), state_dtype=dtype)
    assert not torch.equal(weights(whole), weights(plain))
    model, optimizer = trained(saved_after, **options)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again = network(seed=1)
    again.load_state_dict(saved[0])
    resumed = Neumann(again.named_parameters(), lr=0.5, **CLOCK, **options)
    resumed.load_state_dict(saved[1])
    trained(12 - saved_after, again, resumed, first=saved_after)
    assert torch.equal(weights(again), weights(whole))


def test_the_slow_mean_stays_in_float32():
    """A step changes it by less than bfloat16 can show."""
    p = nn.Parameter(torch.ones(3, 4))
    chosen = Spectral(before=SlowMomentum())
    optimizer = Neumann([p], 0.1, precondition=chosen, state_dtype=torch.bfloat16)
    assert optimizer.state[p]["preconditioner_past"].dtype is torch.bfloat16
    assert optimizer.state[p]["preconditioner_slow"].dtype is torch.float32


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("decay", 1.0, r"decay must be in \[0, 1\), got 1.0"),
        ("slow", 1.0, r"slow must be in \[0, 1\), got 1.0"),
        ("slow", "much", r"slow must be in \[0, 1\), got 'much'"),
        ("share", 1.5, r"share must be in \[0, 1\], got 1.5"),
        ("share", float("nan"), r"share must be in \[0, 1\], got nan"),
        ("start", -1, "start must be an integer of at least 0, got -1"),
        ("start", 2.5, "start must be an integer of at least 0, got 2.5"),
    ],
)
def test_bad_options(option, value, message):
    with pytest.raises(ValueError, match=message):
        SlowMomentum(**{option: value})
