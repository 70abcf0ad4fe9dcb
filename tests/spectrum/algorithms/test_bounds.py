"""The error bounds: how often they hold, and what a β that is 0 up to rounding can hide."""

import itertools

import pytest
import torch

from neumann.spectrum import extremes, lanczos
from neumann.spectrum.algorithms.bounds import outer_bound, plausible_limit, share_of_risk
from neumann.spectrum.operators.vectors import random_unit
from tests.support.known_spectra import close_pairs, diagonal_operator, network_like


def test_the_outer_bound_covers_a_small_component_of_the_start():
    """With the known component of the start, an eigenvalue never lies beyond the bound."""
    values = network_like(400, seed=3)
    run = lanczos(diagonal_operator(values), tolerance=0.0, max_products=12, seed=3)
    start = random_unit(400, 3, torch.float64, torch.device("cpu"))
    share = float(start[int(values.argmin())] ** 2)
    beyond = outer_bound(
        (-run.diagonal).tolist(), run.off_diagonal.tolist(), -run.smallest.value, 1 / share
    )
    assert run.smallest.value - beyond <= float(values.min()) <= run.smallest.value
    assert plausible_limit(400, 0.01) > 1 / share


@pytest.mark.slow
def test_a_large_risk_is_kept():
    """Starts that miss an end are no more frequent than the risk of 0.2."""
    values, runs = close_pairs(300), 150
    missed = 0
    for seed in range(runs):
        found = extremes(diagonal_operator(values), seed=seed, risk=0.2)
        missed += abs(found.largest.value - 1) > found.largest.error
    assert missed / runs < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["outlier", "pair"])
def test_a_small_risk_is_kept(kind):
    """The risk is 0.02, at whatever step the run stops."""
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(100, generator=generator, dtype=torch.float64) / 2
    values[0] = 1.0
    if kind == "pair":
        values[1] = 1 - 2.5e-3
    runs, risk = 150, 0.02
    operator = diagonal_operator(values)
    for options in ({}, {"tolerance": 0.0, "max_products": 5}):
        missed = 0
        for seed in range(runs):
            found = extremes(operator, seed=seed, risk=risk, ends="largest", **options)
            missed += abs(found.largest.value - 1) > found.largest.error
        assert missed / runs <= risk, options


@pytest.mark.slow
def test_an_eigenvalue_hidden_below_rounding_is_found():
    """If the start has a component below 5e-5 along it, the first β is rounding: 1 start in 25."""
    values = torch.ones(10**6)
    values[7] = 1.01
    products = []
    for seed in range(6):
        found = extremes(diagonal_operator(values), seed=seed)
        assert found.converged
        assert found.largest.value == pytest.approx(1.01, abs=found.largest.error)
        assert found.largest.error < 1.1e-3
        products.append(found.products)
    assert sorted(products)[3] == 2
    assert 2 < max(products) < 40  # two of these runs restarted


def test_the_shares_sum_to_the_risk():
    shares = [
        share_of_risk(0.1, 1),
        *(2 * share_of_risk(0.1, starts) for starts in range(2, 100_000)),
    ]
    assert 0.0999 < sum(shares) <= 0.1
    limits = [plausible_limit(1000, share_of_risk(1e-3, starts), starts) for starts in range(2, 9)]
    assert all(later < earlier for earlier, later in itertools.pairwise(limits))


def test_a_hidden_beta_counts_as_the_largest_possible():
    exact, hidden = (outer_bound([1.0], [0.0], 1.0, 1e8, least) for least in (0.0, 1e-6))
    assert exact < 1e-15
    assert hidden == pytest.approx(1e-6 * 1e4, rel=0.02)  # S = 1 + ((λ − 1)/1e-6)²
    assert outer_bound([0.0], [0.0], 3.0, 1e8, 1e-6) < 1e-15  # 3 is far outside this segment


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1.0, 1e200])
def test_the_outer_bound_scales_with_the_matrix(scale):
    """The product of two such numbers underflows or overflows; the bisection must cope with it."""
    expected = outer_bound([1.0], [0.5], 1.0, 1e8, 1e-6)
    found = outer_bound([scale], [0.5 * scale], scale, 1e8, 1e-6 * scale)
    assert found == pytest.approx(expected * scale, rel=0.02)
