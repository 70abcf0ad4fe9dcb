"""Noise in the products: the stated risk holds after two steps as after many."""

import math

import pytest
import torch

from neumann.spectrum import extremes
from neumann.spectrum.algorithms.krylov import NOISE_PER_ASYMMETRY, few_steps_factor
from tests.support.known_spectra import diagonal_operator
from tests.support.spectra import (
    allowed_outside,
    ends_of,
    matrix_ends,
    noisy_operator,
    random_spectrum,
)


def test_the_risk_holds_after_few_steps():
    """Products wrong by 1.4e-3 put the ends of matrices of two rows outside in one run of ten."""
    ends = []
    for seed in range(150):
        generator = torch.Generator().manual_seed(seed)
        values = random_spectrum(generator, 2 + seed % 2)
        operator = noisy_operator(values, 1.4e-3, "fresh", generator)
        ends += ends_of(extremes(operator, seed=seed, tolerance=0.1), values, f"{seed}")
    converged = [end for end in ends if end.converged]
    assert len(converged) > 100
    outside = [end for end in converged if end.outside]
    assert len(outside) <= allowed_outside(len(converged)), outside


def test_random_matrices_are_within_their_errors():
    ends = [end for seed in range(100) for end in matrix_ends(seed, largest=30)]
    outside = [end for end in ends if end.outside]
    assert len(outside) <= allowed_outside(len(ends)), outside


def test_the_binomial_limit():
    assert allowed_outside(10_000, 1e-3) == 28
    assert allowed_outside(1, 1e-3, 1e-2) == 0
    assert allowed_outside(100, 0.5, 1e-6) == 73


@pytest.mark.parametrize("steps", [2, 3, 5, 7])
@pytest.mark.parametrize("columns", ["all", "one"])
def test_the_factor_for_few_steps_covers_the_error(steps, columns):
    """The error of T against the asymmetry, for normal errors of the products."""
    trials, risk = 5_000, 0.02
    generator = torch.Generator().manual_seed(steps)
    errors = torch.randn(trials, steps, steps, generator=generator, dtype=torch.float64)
    if columns == "one":
        errors[:, :, 1:] = 0
    lower = errors.tril(-1)
    of_t = lower + lower.mT + torch.diag_embed(errors.diagonal(dim1=1, dim2=2))
    seen = (errors - errors.mT).triu(1).flatten(1).norm(dim=1)
    factor = few_steps_factor(steps, risk)
    missed = int((torch.linalg.matrix_norm(of_t, 2) > factor * seen).sum())
    assert missed <= allowed_outside(trials, risk)
    if steps == 2:
        assert missed > 0  # the factor is not far too large


def test_long_runs_keep_the_plain_factor():
    assert few_steps_factor(1, 5e-4) == 0
    assert few_steps_factor(2, 5e-4) > 1000
    for steps in range(7, 400):
        assert few_steps_factor(steps, 5e-4) < NOISE_PER_ASYMMETRY


def test_exact_products_of_few_rows_converge():
    for size in (1, 2, 3, 4):
        for dtype in (torch.float32, torch.float64):
            values = torch.linspace(-0.3, 1, size, dtype=torch.float64)
            found = extremes(diagonal_operator(values, dtype))
            assert found.converged
            assert math.isclose(found.largest.value, float(values.max()), rel_tol=1e-6)
