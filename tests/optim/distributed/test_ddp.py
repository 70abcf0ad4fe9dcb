"""DistributedDataParallel: two ranks with half the batch each are one rank with all of it."""

from contextlib import nullcontext

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from neumann import Neumann
from tests.support.small_training import (
    BATCH,
    OPTIONS,
    PRECONDITIONED,
    STEPS,
    batch,
    furthest,
    loss_of,
    network,
    outcome,
    share,
    train,
)
from tests.support.small_training import trained as trained_alone

ACCUMULATED = (6, 6, 4)  # examples in the micro-batches of a rank-sized step; the last is ragged


def trained(options):
    """A rank's outcome after the usual steps on its half."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    model = DistributedDataParallel(network())
    optimizer = Neumann(model.module.named_parameters(), **{**OPTIONS, **options})
    train(model, optimizer, part=lambda x: share(x, rank, ranks))
    return outcome(optimizer), optimizer.diagnostics().as_dict()


def test_two_micro_batches_equal_one_batch(two):
    for options in ({}, {"foreach": True}, {"skip_nonfinite": True}):
        alone = trained_alone(**options)
        for ours, diagnostics in two.run(trained, options):
            assert furthest(ours, outcome(alone)) < 1e-12
            assert diagnostics["phase"] == "iterate"
            assert diagnostics["step"] == STEPS


@pytest.mark.parametrize("name", PRECONDITIONED)
def test_two_preconditioned_micro_batches_equal_one_batch(two, name):
    alone = outcome(trained_alone(precondition=name))
    for ours, _ in two.run(trained, {"precondition": name}):
        assert furthest(ours, alone) < PRECONDITIONED[name]


def accumulated():
    """Micro-batches under no_sync, each weighted by its share of the rank's examples."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    model = DistributedDataParallel(network())
    optimizer = Neumann(model.module.named_parameters(), **OPTIONS)
    for step in range(STEPS):
        optimizer.zero_grad()
        pieces = share(batch(step, size=2 * BATCH), rank, ranks).split(ACCUMULATED)
        assert [len(piece) for piece in pieces] == list(ACCUMULATED)
        for index, piece in enumerate(pieces):
            last = index == len(pieces) - 1
            with nullcontext() if last else model.no_sync():
                (loss_of(model, piece) * len(piece) / BATCH).backward()
        optimizer.step()
    return outcome(optimizer)


def test_accumulation_with_a_ragged_last_micro_batch(two):
    model = network()
    optimizer = Neumann(model.named_parameters(), **OPTIONS)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step, size=2 * BATCH)).backward()
        optimizer.step()
    for ours in two.run(accumulated):
        assert furthest(ours, outcome(optimizer)) < 1e-12


def overflowed(options):
    """NaN gradients of one rank only, in two of eight steps."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = Neumann([p], lr=0.1, warmup_steps=2, reset_steps=3, skip_nonfinite=True, **options)
    for step in range(8):
        bad = distributed.get_rank() == 1 and step in (1, 4)
        p.grad = torch.full((3,), float("nan") if bad else 0.5)
        optimizer.step()
    return p.detach(), optimizer.diagnostics().as_dict()


def test_an_overflow_on_one_rank_is_skipped_on_all(two):
    for options in ({}, {"foreach": True}):
        (first, diagnostics), (second, same) = two.run(overflowed, options)
        assert torch.equal(first, second)
        assert diagnostics == same
        assert (diagnostics["step"], diagnostics["skipped"]) == (6, 2)
