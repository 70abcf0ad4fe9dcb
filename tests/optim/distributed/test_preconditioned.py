"""Preconditioned steps of sharded and copied parameters are those of one process."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.support.sharding import FLAT, HYBRID, needs_fsdp, own_share, sharded
from tests.support.small_training import PRECONDITIONED, STEPS, furthest, outcome, train
from tests.support.small_training import trained as trained_alone

pytestmark = needs_fsdp
STOP = 6


def trained(name, shape, **options):
    model, optimizer = sharded(shape, torch.float64, precondition=name, **options)
    train(model, optimizer, range(STEPS), own_share)
    return outcome(optimizer)


@pytest.mark.parametrize(
    ("name", "distributed"), [("diagonal", None), ("spectral", "owner"), ("spectral", "replicated")]
)
def test_two_ranks_equal_one_process(two, name, distributed):
    alone = outcome(trained_alone(precondition=name, foreach=True))
    for ours in two.run(trained, name, FLAT, foreach=True, distributed=distributed):
        assert furthest(ours, alone) < PRECONDITIONED[name]


@pytest.mark.parametrize("name", PRECONDITIONED)
@pytest.mark.parametrize("shape", [FLAT, HYBRID])
def test_four_ranks_equal_one_process(four, name, shape):
    """Some have no rows of a matrix; replicas of two shards."""
    alone = outcome(trained_alone(precondition=name))
    for ours in four.run(trained, name, shape):
        assert furthest(ours, alone) < PRECONDITIONED[name]


def sizes():
    model, optimizer = sharded(FLAT, torch.float64, precondition="spectral")
    train(model, optimizer, range(2), own_share)
    past = [optimizer.state[p]["preconditioner_past"] for p in model.parameters()]
    held = sum(tensor.to_local().numel() for tensor in past)
    return held, sum(p.to_local().numel() for p in model.parameters())


def test_state_with_one_entry_per_weight_is_sharded(two):
    for held, own in two.run(sizes):
        assert held == own


def resumed(name):
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = sharded(FLAT, torch.float64, precondition=name)
    train(model, optimizer, range(STOP), own_share)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    again, other = sharded(FLAT, torch.float64, precondition=name)
    for p, q in zip(again.parameters(), model.parameters(), strict=True):
        p.data.copy_(q.data)
    set_optimizer_state_dict(again, other, saved, options=options)
    train(model, optimizer, range(STOP, STEPS), own_share)
    train(again, other, range(STOP, STEPS), own_share)
    return outcome(optimizer), outcome(other)


@pytest.mark.parametrize("name", PRECONDITIONED)
def test_a_full_state_dict_loads_into_shards(two, name):
    for ours, theirs in two.run(resumed, name):
        assert furthest(ours, theirs) == 0
