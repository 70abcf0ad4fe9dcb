"""What hides behind a β that is 0 to rounding, and how often an error is larger than stated."""

import itertools

import pytest
import torch

from neumann.spectrum import FunctionOperator, extremes, lanczos
from neumann.spectrum.tridiagonal import most_plausible, outer_bound, share


def diagonal(values):
    return FunctionOperator(lambda v: values * v, len(values), dtype=values.dtype)


def test_an_eigenvalue_below_rounding_is_found():
    """With a part of 5e-5 or less along the odd one, the first β is rounding: 1 start of 25."""
    values = torch.ones(10**6)
    values[7] = 1.01
    products = []
    for seed in range(40):
        found = extremes(diagonal(values), seed=seed)
        assert found.converged
        assert found.largest.value == pytest.approx(1.01, abs=found.largest.error)
        assert found.largest.error < 1.1e-3
        products.append(found.products)
    assert sorted(products)[30] == 2
    assert 2 < max(products) < 40  # some started anew


@pytest.mark.parametrize("size", [50, 10_000])
def test_the_identity_in_float32_needs_some_starts(size):
    found = extremes(diagonal(torch.full((size,), -2.5)))
    assert found.converged
    assert found.smallest.value == pytest.approx(-2.5, rel=1e-6)
    assert found.largest.value == pytest.approx(-2.5, rel=1e-6)
    assert 1 < found.products < 10
    stopped = lanczos(diagonal(torch.full((size,), -2.5)), restart=False)
    assert stopped.steps == 1
    assert stopped.largest.error > found.largest.error
    assert not stopped.largest.converged


def test_vectors_stay_orthogonal_over_starts():
    values = torch.ones(10**6)
    values[7] = 1.01
    run = lanczos(diagonal(values), tolerance=0.0, max_products=12, vectors=6, seed=1)
    assert run.restarts > 3
    vectors = run.vectors.double()
    overlaps = vectors @ vectors.T
    assert torch.allclose(overlaps, torch.eye(len(overlaps)).double(), atol=1e-4)
    assert run.noise < 1e-4


def test_the_shares_add_up_to_the_risk():
    shares = [share(0.1, 1), *(2 * share(0.1, starts) for starts in range(2, 100_000))]
    assert 0.0999 < sum(shares) <= 0.1
    limits = [most_plausible(1000, share(1e-3, starts), starts) for starts in range(2, 9)]
    assert all(later < earlier for earlier, later in itertools.pairwise(limits))


def test_a_hidden_number_counts_as_the_largest_that_can_hide():
    exact, hidden = (outer_bound([1.0], [0.0], 1.0, 1e8, least) for least in (0.0, 1e-6))
    assert exact < 1e-15
    assert hidden == pytest.approx(1e-6 * 1e4, rel=0.02)  # S = 1 + ((λ − 1)/1e-6)²
    assert outer_bound([0.0], [0.0], 3.0, 1e8, 1e-6) < 1e-15  # 3 is far outside of this part


@pytest.mark.parametrize("kind", ["outlier", "pair"])
def test_the_stated_risk_is_kept_where_it_is_small(kind):
    """At a risk of 0.02, at whatever step one stops."""
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(100, generator=generator, dtype=torch.float64) / 2
    values[0] = 1.0
    if kind == "pair":
        values[1] = 1 - 2.5e-3
    runs, risk = 300, 0.02
    operator = diagonal(values)
    for options in ({}, {"tolerance": 0.0, "max_products": 5}):
        missed = 0
        for seed in range(runs):
            found = extremes(operator, seed=seed, risk=risk, ends="largest", **options)
            missed += abs(found.largest.value - 1) > found.largest.error
        assert missed / runs <= risk, options


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1.0, 1e200])
def test_the_outer_bound_scales(scale):
    """The product of two such numbers is 0 or infinite, and the bisection must not mind."""
    expected = outer_bound([1.0], [0.5], 1.0, 1e8, 1e-6)
    found = outer_bound([scale], [0.5 * scale], scale, 1e8, 1e-6 * scale)
    assert found == pytest.approx(expected * scale, rel=0.02)
