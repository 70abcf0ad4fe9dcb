"""The computed table of docs/scale.md."""

from itertools import starmap
from pathlib import Path

import pytest

from benchmarks.step.scale_table import MODELS, make_table, owner_cost
from neumann.optim.preconditioners.orthogonalization import count_operations
from neumann.optim.preconditioners.ownership import Matrix, find_place, make_plan


def test_the_page_shows_the_table():
    page = Path(__file__).parents[2] / "docs" / "scale.md"
    assert make_table() in page.read_text()


@pytest.mark.parametrize(("replicas", "shards"), [(1, 8), (2, 4), (8, 1)])
def test_the_formulas_are_those_of_a_plan(replicas, shards):
    shapes = MODELS["7 B"][:150]
    matrices = [Matrix(s, (None, 0), count_operations(*s), 4) for s in shapes]
    sizes = (replicas, shards)
    plans = [make_plan(matrices, sizes, find_place(p, sizes)) for p in range(replicas * shards)]
    cost = owner_cost(shapes, replicas, shards)
    assert cost.bytes_sent == max(plan.bytes_sent for plan in plans)
    assert cost.operations == max(plan.operations for plan in plans)
    assert cost.matrices == max(len(plan.owned) for plan in plans)
    assert sum(plan.operations for plan in plans) == sum(starmap(count_operations, shapes))
