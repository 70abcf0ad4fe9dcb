"""Who owns which matrix: balanced, in batches, and the same answer on all processes."""

import itertools
import math

import pytest
import torch

from neumann.optim.preconditioners import Spectral
from neumann.optim.preconditioners.exchange import describe_matrix
from neumann.optim.preconditioners.ownership import (
    Matrix,
    chunk_size,
    divide,
    find_place,
    make_plan,
)


def matrix(*shape, shards=(0,), itemsize=4, kind=""):
    rows, columns = sorted((shape[0], math.prod(shape[1:])))
    return Matrix(shape, shards, 20 * rows**2 * columns, itemsize, kind)


def loads_of(owners, costs, processes):
    return [sum(c for o, c in zip(owners, costs, strict=True) if o == p) for p in range(processes)]


def test_equal_matrices_stay_together():
    costs = [9] * 8 + [3] * 24
    owners = divide(costs, 4)
    assert loads_of(owners, costs, 4) == [36] * 4
    assert owners == sorted(owners)  # runs of neighbors: no process has more than one cost


def test_balance_comes_before_batches():
    """Runs would leave one process with two of the large ones."""
    costs = [4, 4, 4] + [1] * 6
    assert loads_of(divide(costs, 3), costs, 3) == [6, 6, 6]


@pytest.mark.parametrize("processes", [2, 3, 8, 64])
def test_no_process_has_much_more_than_its_share(processes):
    costs = sorted((17**i % 97 + 3 for i in range(150)), reverse=True)
    busiest = max(loads_of(divide(costs, processes), costs, processes))
    assert busiest <= 1.05 * (sum(costs) / processes + max(costs))


def test_the_largest_matrices_are_dealt_out_first():
    """Costs 5, 4, 3, 1 and 1 for two processes: 7 and 7, and 9 and 5 with the smallest first."""
    matrices = [matrix(1, columns) for columns in (1, 3, 5, 1, 4)]
    plans = [make_plan(matrices, (2,), (place,)) for place in range(2)]
    assert [plan.operations for plan in plans] == [7 * 20, 7 * 20]


def test_fewer_matrices_than_processes_have_one_each():
    assert divide([5, 5, 1], 8) == [0, 2, 5]
    assert divide([7], 3) == [0]
    assert divide([], 3) == []


def test_chunks_are_those_of_torch():
    for length, count in itertools.product(range(10), range(1, 6)):
        chunks = [len(c) for c in torch.empty(length).chunk(count)] if length else []
        wanted = chunks + [0] * (count - len(chunks))
        assert [chunk_size(length, count, i) for i in range(count)] == wanted


MIXED = [
    matrix(7, 3, shards=(0, 0)),
    matrix(8, 6, shards=(0, 1)),
    matrix(6, 8, shards=(None, 0)),
    matrix(6, 8, shards=(1, None)),
    matrix(2, 9, shards=(None, None)),
    matrix(4, 3, 2, 2, shards=(None, 0)),
    matrix(5, 5, shards=(0, 1), itemsize=8, kind="double"),
]


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (1, 4), (4, 1)])
@pytest.mark.parametrize("limit", [0, 2**25])
def test_what_one_process_sends_is_what_another_expects(sizes, limit):
    places = [find_place(i, sizes) for i in range(math.prod(sizes))]
    plans = {place: make_plan(MIXED, sizes, place, limit) for place in places}
    owned = [i for plan in plans.values() for i in plan.owned]
    assert sorted(owned) == list(range(len(MIXED)))
    for place, plan in plans.items():
        for number, own in enumerate(plan.rounds):
            hops = (*own.gathers, *own.returns)
            for hop, transfer in enumerate(hops):
                for coordinate, blocks in enumerate(transfer.outgoing):
                    there = list(place)
                    there[transfer.dimension] = coordinate
                    other = plans[tuple(there)].rounds[number]
                    expected = (*other.gathers, *other.returns)[hop]
                    assert expected.dimension == transfer.dimension
                    assert expected.incoming[place[transfer.dimension]] == blocks
            for hop, share in enumerate(own.shares):
                for coordinate in range(sizes[share.dimension]):
                    there = list(place)
                    there[share.dimension] = coordinate
                    assert plans[tuple(there)].rounds[number].shares[hop] == share


def test_kinds_never_travel_together():
    plan = make_plan(MIXED, (2, 2), (0, 0))
    assert [len(each.matrices) for each in plan.rounds] == [len(MIXED) - 1, 1]


def test_matrices_of_other_dtypes_are_of_other_kinds():
    """Of P's arithmetic, in which they travel: bfloat16 is float32 there."""
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    matrices = [describe_matrix(Spectral(), torch.ones(4, 3, dtype=d), (0,)) for d in dtypes]
    single, narrow, double = (each.kind for each in matrices)
    assert single == narrow != double
    assert [each.itemsize for each in matrices] == [4, 4, 8]
    plan = make_plan(matrices, (2,), (0,))
    assert sorted(each.matrices for each in plan.rounds) == [(0, 1), (2,)]


# ------------------------------------------------------------------ bytes: the formulas of the docs

EVEN = [matrix(64, 48)] * 5 + [matrix(32, 128)] * 6 + [matrix(96, 32)] * 3


def elements(plan):
    return sum(math.prod(EVEN[i].shape) for i in plan.owned)


@pytest.mark.parametrize("processes", [1, 2, 4, 16])
def test_bytes_of_flat_shards(processes):
    n, total = processes, sum(math.prod(m.shape) for m in EVEN)
    for place in range(n):
        plan = make_plan(EVEN, (n,), (place,))
        own = elements(plan)
        assert plan.bytes_sent == 4 * ((total - own) + (n - 1) * own) / n


@pytest.mark.parametrize(("replicas", "shards"), [(2, 2), (4, 2), (2, 8)])
def test_bytes_of_replicated_shards(replicas, shards):
    hybrid = [Matrix(m.shape, (None, 0), m.operations, 4) for m in EVEN]
    for row in range(replicas):
        plans = [make_plan(hybrid, (replicas, shards), (row, i)) for i in range(shards)]
        together = sum(map(elements, plans))  # of this replica
        for plan in plans:
            own = elements(plan)
            there_and_back = ((together - own) + (shards - 1) * own) / shards
            shared = (replicas - 1) * together / shards
            assert plan.bytes_sent == 4 * (there_and_back + shared)


@pytest.mark.parametrize("processes", [2, 5])
def test_bytes_of_replicas(processes):
    whole = [Matrix(m.shape, (None,), m.operations, 4) for m in EVEN]
    for place in range(processes):
        plan = make_plan(whole, (processes,), (place,))
        assert plan.bytes_sent == 4 * (processes - 1) * elements(plan)
