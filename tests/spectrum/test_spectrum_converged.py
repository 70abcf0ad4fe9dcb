"""What `converged` means: the error is as small as was asked for, of the ends that were."""

import pytest
import torch
from torch import nn

from neumann.spectrum import Differences, FunctionOperator, MatrixOperator, extremes, lanczos


def diagonal(values):
    return FunctionOperator(lambda v: values * v, len(values), dtype=values.dtype)


def test_a_whole_space_of_products_that_are_not_symmetric_has_not_converged():
    square = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rotation = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    for matrix in (square, rotation):
        found = extremes(MatrixOperator(matrix))
        assert found.steps == len(matrix)
        assert found.largest.error > found.largest.tolerance
        assert not found.converged
    assert extremes(MatrixOperator(square + square.T)).converged


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_whole_space_of_exact_products_has_whatever_was_asked_for(dtype):
    square = torch.randn(30, 30, generator=torch.Generator().manual_seed(0), dtype=dtype)
    for tolerance in (0.0, 1e-15):
        found = extremes(MatrixOperator(square + square.T), tolerance=tolerance)
        assert found.steps == 30
        assert found.converged


def test_differences_over_a_whole_space_still_have_their_noise():
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    x = torch.tensor([[1.0, 2.0], [0.5, -1.0]])

    def loss(outputs, targets):
        return (30 * outputs).sin().mean()

    found = extremes(Differences(model, loss, batch=(x, x), step=0.05))
    assert found.steps == 2
    assert found.noise > found.largest.tolerance
    assert not found.converged


def test_flags_of_inner_values_follow_what_they_are_relative_to():
    """A value of 0.03 to within 5e-3 is 1 % of the largest, but not 1 % of itself."""
    values = torch.logspace(-6, 0, 200, dtype=torch.float64)
    options = {"tolerance": 1e-2, "max_products": 12, "ends": "both"}
    loose = lanczos(diagonal(values), **options)
    strict = lanczos(diagonal(values), relative_to="itself", **options)
    for run, rooms in (
        (loose, 1e-2 * loose.values.abs().max().expand_as(loose.values)),
        (strict, 1e-2 * strict.values.abs()),
    ):
        assert torch.equal(run.converged, run.residuals + run.noise <= rooms)
    assert 0 < int(strict.converged.sum()) < strict.steps
    assert (strict.residuals[~strict.converged] < 1e-2).any()


def test_of_one_end_only_that_end_counts():
    generator = torch.Generator().manual_seed(0)
    values = 0.01 * torch.randn(1000, generator=generator, dtype=torch.float64)
    values[:3] = torch.tensor([1.0, 0.8, -0.06])
    top = extremes(diagonal(values), ends="largest")
    assert top.ends == "largest"
    assert top.converged
    assert top.largest.converged
    assert not top.smallest.converged
    assert top.as_dict()["ends"] == "largest"
    bottom = extremes(diagonal(-values), ends="smallest")
    assert bottom.converged
    assert not bottom.largest.converged
    both = extremes(diagonal(values), max_products=top.products)
    assert both.ends == "both"
    assert not both.converged
