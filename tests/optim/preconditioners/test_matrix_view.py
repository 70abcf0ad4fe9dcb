"""Matrices inside one tensor: each gets the direction that it would get by itself."""

import pytest
import torch
from torch import nn

from neumann import Neumann
from neumann.optim.preconditioners import Spectral
from neumann.optim.preconditioners.matrix_view import MatrixView

# Each view with a shape that it fits, and the same matrices taken out by hand.
CASES = {
    "fused": (MatrixView(parts=3), (12, 5), lambda t: list(t.chunk(3))),
    "unequal parts": (MatrixView(parts=(6, 2, 2)), (10, 4), lambda t: list(t.split((6, 2, 2)))),
    "heads": (MatrixView(parts=3, heads=2), (12, 5), lambda t: list(t.chunk(6))),
    "in × out": (
        MatrixView(parts=3, transposed=True),
        (4, 15),
        lambda t: [part.mT for part in t.chunk(3, 1)],
    ),
    "stacked": (MatrixView(stacked=True), (3, 6, 4), lambda t: list(t)),
    "stacked and fused": (
        MatrixView(stacked=True, parts=2),
        (3, 6, 4),
        lambda t: [half for matrix in t for half in matrix.chunk(2)],
    ),
    "stacked, fused, heads": (
        MatrixView(stacked=True, parts=2, heads=2),
        (2, 8, 3),
        lambda t: [head for matrix in t for head in matrix.chunk(4)],
    ),
    "depthwise": (MatrixView(stacked=True), (6, 1, 3, 3), lambda t: [c.flatten(1) for c in t]),
    "groups": (MatrixView(groups=2), (6, 4, 3, 3), lambda t: [g.flatten(1) for g in t.chunk(2)]),
    "transposed convolution": (
        MatrixView(groups=2, transposed=True),
        (6, 4, 3, 3),
        lambda t: [g.transpose(0, 1).flatten(1) for g in t.chunk(2)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_view_finds_the_matrices(name):
    view, shape, by_hand = CASES[name]
    tensor = torch.arange(torch.Size(shape).numel()).float().reshape(shape)
    batches = view.split(tensor)
    found = [matrix.flatten(1).tolist() for batch in batches for matrix in batch]
    assert sorted(found) == sorted(matrix.flatten(1).tolist() for matrix in by_hand(tensor))
    assert torch.equal(view.join(batches, tensor), tensor)


@pytest.mark.parametrize("name", CASES)
def test_each_matrix_has_its_own_direction(name):
    """The direction of each is the one of orthogonalizing it by hand, to 1e-6 in float32."""
    view, shape, by_hand = CASES[name]
    torch.manual_seed(0)
    gradient = torch.randn(shape)
    (direction,) = Spectral(view=view).apply([gradient], [{}])
    assert direction.stride() == gradient.stride()
    for matrix, found in zip(by_hand(gradient), by_hand(direction), strict=True):
        whole = MatrixView(parts=(len(matrix),))  # a view, so that one row is a matrix too
        (expected,) = Spectral(view=whole).apply([matrix], [{}])
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        if min(matrix.shape) > 1:
            (expected,) = Spectral().apply([matrix], [{}])
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_several_parameters_at_once():
    torch.manual_seed(0)
    gradients = [torch.randn(12, 5), torch.randn(6, 9), torch.randn(12, 5)]
    view = Spectral(view=MatrixView(parts=3))
    together = view.apply(gradients, [{}] * 3)
    for gradient, direction in zip(gradients, together, strict=True):
        torch.testing.assert_close(direction, view.apply([gradient], [{}])[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("view", "shape", "message"),
    [
        (MatrixView(parts=3), (10, 4), r"10 rows .*\(10, 4\) do not divide into 3 parts"),
        (MatrixView(parts=(3, 4)), (10, 4), r"\(3, 4\) do not add up to the 10 outputs"),
        (MatrixView(parts=2, heads=3), (10, 4), "5 rows .* into 3 heads"),
        (MatrixView(groups=4), (10, 4, 3, 3), "10 rows .* into 4 groups"),
        (MatrixView(stacked=True), (10, 4), r"\(10, 4\) holds no matrix"),
    ],
)
def test_a_view_that_does_not_fit(view, shape, message):
    with pytest.raises(ValueError, match=message):
        view.split(torch.ones(shape))
    weight = nn.Parameter(torch.ones(shape))
    with pytest.raises(ValueError, match=message):  # before the first step
        Neumann([weight], 0.1, precondition=Spectral(view=view))


@pytest.mark.parametrize("options", [{"parts": 0}, {"parts": ()}, {"heads": 0}, {"groups": 1.5}])
def test_bad_views(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        MatrixView(**options)


@pytest.mark.parametrize("name", CASES)
def test_scaled_by_norm_every_matrix_changes_its_outputs_alike(name):
    """The singular values are about scale · √(outputs / inputs); a kernel counts √taps inputs."""
    view, shape, by_hand = CASES[name]
    torch.manual_seed(0)
    (direction,) = Spectral(scale=3.0, view=view, scaling="norm").apply([torch.randn(shape)], [{}])
    taps = view.split(direction)[0].shape[3:].numel()
    for matrix in by_hand(direction):
        size = (matrix.shape[0] / matrix.shape[1] * taps**0.5) ** 0.5
        values = torch.linalg.svdvals(matrix) / (3 * size)
        assert values.min() > 0.6
        assert values.max() < 1.3
