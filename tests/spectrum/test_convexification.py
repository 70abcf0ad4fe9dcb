"""The paper's coefficients make a spectrum positive."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neumann.spectrum import MatrixOperator, coefficients, extremes


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_both_ends_of_the_convexified_spectrum(lambda_min, lambda_max):
    lambda_min = min(lambda_min, lambda_max)
    found = coefficients(lambda_min, lambda_max)

    def becomes(eigenvalue):
        return 1 - found.momentum + found.momentum * found.lr * eigenvalue

    assert 0 < found.momentum <= 1
    assert found.lr * lambda_max == pytest.approx(1)
    assert becomes(lambda_max) == pytest.approx(found.highest) == 1
    assert becomes(lambda_min) == pytest.approx(found.lowest, abs=1e-9)
    if lambda_min < 0:
        assert found.lowest == 0
        assert found.condition == math.inf
    else:
        assert 0 <= found.lowest <= 1


def test_a_worked_example():
    found = coefficients(-1.0, 9.0)
    assert found.momentum == pytest.approx(0.9)
    assert found.lr == pytest.approx(1 / 9)
    assert coefficients(1.0, 3.0).condition == pytest.approx(2)


def test_bounds_outside_the_spectrum_make_it_positive_definite():
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(80, 80, generator=generator, dtype=torch.float64)
    matrix = half + half.T + 3 * torch.eye(80, dtype=torch.float64)
    found = extremes(MatrixOperator(matrix))
    below, above = found.outside
    exact = torch.linalg.eigvalsh(matrix)
    assert below < exact[0] < exact[-1] < above
    made = coefficients(below, above)
    convex = (1 - made.momentum) * torch.eye(80) + made.momentum * made.lr * matrix
    assert torch.linalg.eigvalsh(convex)[0] > 0
    assert torch.linalg.eigvalsh(convex)[-1] < 1
    # Ten steps, as in the paper, stop inside the spectrum.
    few = extremes(MatrixOperator(matrix), tolerance=0.0, max_products=10)
    made = coefficients(few.smallest.value, few.largest.value)
    convex = (1 - made.momentum) * torch.eye(80) + made.momentum * made.lr * matrix
    assert torch.linalg.eigvalsh(convex)[0] < 0


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((-1.0, 0.0), "lambda_max must be above 0"),
        ((2.0, 1.0), "lambda_min must be at most 1.0"),
        ((math.nan, 1.0), "must be finite"),
        ((-1.0, math.inf), "must be finite"),
    ],
)
def test_arguments_are_checked(pair, message):
    with pytest.raises(ValueError, match=message):
        coefficients(*pair)
