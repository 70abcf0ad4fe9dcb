"""Plans: the batches of an epoch, divided among ranks and micro-batches, and bad arguments."""

import pytest
import torch

from neumann.lab.data import Plan
from neumann.lab.data.plan import derive_seed
from neumann.lab.errors import UsageError


def positions(plan, examples):
    """For each batch, the positions in the order that this rank takes, piece by piece."""
    return [[list(range(examples))[piece] for piece in pieces] for pieces in plan.slices(examples)]


def test_training_drops_the_ragged_batch():
    assert positions(Plan(4), 10) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert Plan(4).count_batches(10) == 2


def test_evaluation_keeps_the_ragged_batch():
    assert positions(Plan(4, train=False), 10)[-1] == [[8, 9]]
    assert Plan(4, train=False).count_batches(10) == 3
    assert Plan(16, train=False).count_batches(10) == 1


def test_ranks_and_micro_batches_cut_the_same_pieces():
    whole = positions(Plan(8, micro_batches=4), 19)
    ranks = [positions(Plan(8, micro_batches=2, rank=rank, ranks=2), 19) for rank in range(2)]
    assert [a + b for a, b in zip(*ranks, strict=True)] == whole


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("examples", [1, 4, 10, 23])
def test_evaluation_takes_every_example_once(ranks, micro_batches, examples):
    every = [
        positions(Plan(4, micro_batches, rank=rank, ranks=ranks, train=False), examples)
        for rank in range(ranks)
    ]
    assert len({len(batches) for batches in every}) == 1, (
        "every rank must get the same number of batches"
    )
    assert all(piece for batches in every for batch in batches for piece in batch)
    seen = [n for batches in every for batch in batches for piece in batch for n in piece]
    assert sorted(seen) == list(range(examples))


def test_first_skips_batches():
    assert positions(Plan(2, first=3), 10) == positions(Plan(2), 10)[3:]
    assert positions(Plan(2, first=9), 10) == []


def test_the_order_depends_only_on_seed_and_epoch():
    order = Plan(4, seed=1, epoch=2).order(100)
    torch.manual_seed(5)
    assert order.equal(Plan(10, 5, seed=1, epoch=2, first=1, rank=1, ranks=2).order(100))
    assert not order.equal(Plan(4, seed=1, epoch=3).order(100))
    assert not order.equal(Plan(4, seed=2, epoch=2).order(100))
    assert order.sort().values.equal(torch.arange(100))
    assert Plan(4, train=False).order(100).equal(torch.arange(100))


def test_derived_seeds_differ():
    purposes, seeds, epochs = ("order", "shift"), range(-2, 20), range(20)
    found = {
        derive_seed(purpose, seed, epoch)
        for purpose in purposes
        for seed in seeds
        for epoch in epochs
    }
    assert len(found) == len(purposes) * len(seeds) * len(epochs)
    assert all(0 <= number < 2**32 for number in found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": 4, "first": -1}, "first must be at least 0, got -1"),
        ({"batch_size": 4, "rank": 2, "ranks": 2}, "rank must be below ranks = 2, got 2"),
        ({"batch_size": 4, "micro_batches": 3}, "batch size 4 does not divide into 3 equal"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        Plan(**arguments)


def test_a_batch_larger_than_the_set_is_refused():
    with pytest.raises(UsageError, match=r"batch size 11 is larger than the training set; .* 10"):
        Plan(11).count_batches(10)
    with pytest.raises(UsageError, match="no examples"):
        Plan(1, train=False).count_batches(0)
