"""Random starts: unit vectors, reproducible, and independent of what users draw."""

import pytest
import torch

from neumann.spectrum import FunctionOperator, density, extremes
from neumann.spectrum.operators.vectors import random_unit

CPU = torch.device("cpu")


def drawn(size, seed, dtype):
    """Return what a user would draw with this seed."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_matrix_drawn_from_the_same_seed(dtype):
    """H = uuᵀ with u drawn from the seed has the ends 0 and |u|², not |u|² twice."""
    for seed in range(3):
        u = drawn(100, seed, dtype)
        operator = FunctionOperator(lambda v, u=u: u * (u @ v), 100, dtype=dtype)
        found = extremes(operator, seed=seed)
        assert found.converged
        assert abs(found.smallest.value) <= found.smallest.error
        assert found.largest.value == pytest.approx(float(u @ u), abs=found.largest.error)
        shape = density(operator, probes=20, steps=2, seed=seed)
        assert shape.trace.value < 3 * float(u @ u)  # a probe along u would give 100 times that


def test_starts_come_from_their_own_random_stream():
    for dtype in (torch.float32, torch.float64):
        starts = [random_unit(10_000, seed, dtype, CPU, draw) for seed in (0, 1) for draw in (0, 1)]
        others = [drawn(10_000, seed, dtype) for seed in range(50)]
        table = torch.stack([*starts, *(u / u.norm() for u in others)]).double()
        overlaps = table @ table.T - torch.eye(len(table))
        assert overlaps.abs().max() < 0.06
    assert torch.equal(random_unit(9, 5, torch.float32, CPU), random_unit(9, 5, torch.float32, CPU))
    assert random_unit(9, -1, torch.float32, CPU).isfinite().all()


def test_a_long_start_in_float32_has_length_1():
    start = random_unit(10**6, 0, torch.float32, CPU).double()
    assert float(start.norm()) == pytest.approx(1, abs=1e-6)
