"""P for the output layer: against formulas, on gradients that are longer in some directions."""

import pytest
import torch
from torch import nn

from benchmarks.language.language_arms import Setting
from benchmarks.language.output_preconditioners import (
    RotatedDiagonal,
    WhitenedRows,
    create_basis,
    turn_basis,
)
from benchmarks.language.step_wrappers import RotatedOutput
from neumann.optim.preconditioners import Diagonal


def make_output_gradients(count=30):
    """Gradients of a tall matrix whose rows are far longer in some directions than in others."""
    torch.manual_seed(0)
    turned = torch.linalg.qr(torch.randn(6, 6)).Q
    lengths = torch.tensor([30.0, 10.0, 3.0, 1.0, 0.3, 0.1])
    return turned, [torch.randn(40, 6) * lengths @ turned.mT for _ in range(count)]


def test_the_rotated_diagonal_evens_out_all_directions_of_a_row():
    turned, gradients = make_output_gradients()
    sizes = {}
    for p in (Diagonal(decay=0.95), RotatedDiagonal()):
        state = p.create(gradients[0])
        for gradient in gradients:
            (direction,) = p.apply([gradient], [state])
        sizes[p.name] = (direction @ turned).square().mean(0).sqrt()
    assert sizes["diagonal"].max() > 5 * sizes["diagonal"].min()
    assert torch.allclose(sizes["rotated diagonal"], torch.full((6,), 0.2), rtol=0.3)


def test_whitened_rows_without_memory_are_the_polar_factor_of_even_rows():
    _, (gradient, *_) = make_output_gradients(1)
    gradient = gradient * torch.logspace(-3, 3, 40)[:, None]
    p = WhitenedRows(memory=0.0, scale=1.0)
    (direction,) = p.apply([gradient], [p.create(gradient)])
    even = gradient / gradient.square().mean(1, keepdim=True).sqrt()
    left, _, right = torch.linalg.svd(even, full_matrices=False)
    assert torch.allclose(direction, left @ right * 40**0.5, atol=1e-3)
    assert direction.square().mean().sqrt() == pytest.approx(1.0, abs=1e-3)


def test_whitened_rows_even_out_tokens_and_directions():
    turned, gradients = make_output_gradients()
    p = WhitenedRows()
    state = p.create(gradients[0])
    for gradient in gradients:
        (direction,) = p.apply([gradient * torch.logspace(-3, 3, 40)[:, None]], [state])
    assert torch.allclose((direction @ turned).square().mean(0).sqrt(), torch.tensor(0.2), rtol=0.5)
    rows = direction.square().mean(1).sqrt()
    assert rows.max() < 10 * rows.min()


def test_the_basis_follows_the_eigenvectors():
    _, gradients = make_output_gradients()
    state = create_basis(gradients[0])
    for seen, gradient in enumerate(gradients, 1):
        turn_basis(state, gradient, seen)
    basis = state["basis"]
    assert torch.allclose(basis.mT @ basis, torch.eye(6), atol=1e-5)
    inside = basis.mT @ state["gram"] @ basis
    scale = inside.diagonal().sqrt()
    assert ((inside / scale / scale[:, None]).fill_diagonal_(0).abs() < 0.2).all()
    assert (inside.diagonal().diff() < 0).all()


def test_rotated_output_makes_adamw_a_soap_of_one_side():
    _, gradients = make_output_gradients(12)
    weights = nn.Parameter(torch.ones(40, 6))
    adamw = torch.optim.AdamW([weights], lr=0.1, betas=(0.9, 0.95), weight_decay=0.5)
    wrapped = RotatedOutput(adamw, Setting("muon", 0.1, strength=1.0), 12, weights)
    expected, state = torch.ones(40, 6), create_basis(weights)
    average, square = torch.zeros(40, 6), torch.zeros(40, 6)
    for seen, gradient in enumerate(gradients, 1):
        weights.grad = gradient.clone()
        wrapped.step()
        turn_basis(state, gradient, seen)
        basis = state["basis"]
        average = 0.9 * average + 0.1 * gradient  # in the basis of the weights
        square = 0.95 * square + 0.05 * (gradient @ basis).square()
        root = (square / (1 - 0.95**seen)).sqrt() + 1e-8
        direction = average @ basis / (1 - 0.9**seen) / root @ basis.mT
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * direction
        assert torch.allclose(weights, expected, atol=1e-4)
