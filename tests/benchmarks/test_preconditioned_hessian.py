"""The preconditioner whose product with the Hessian is measured is that of the optimizer."""

import torch
from torch import nn

from benchmarks.spectrum.preconditioned_hessian import find_root
from neumann import Neumann
from neumann.optim.preconditioners import Spectral


def test_p_of_a_bias_is_what_the_optimizer_applies():
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = Neumann(model.parameters(), lr=0.01, precondition="spectral")
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().sum().backward()
        optimizer.step()
    spectral, gradient, state = Spectral(), model.bias.grad, optimizer.state[model.bias]
    side, root = find_root(gradient, state, spectral)
    before = {
        "second_moment": (state["preconditioner_vector_second_moment"] - 0.01 * gradient**2) / 0.99,
        "seen": state["preconditioner_vector_seen"] - 1,
    }
    (applied,) = spectral.vectors.apply([gradient], [before])
    assert side == "elementwise"
    torch.testing.assert_close(root**2 * gradient, applied)


def test_p_of_a_matrix_turns_its_gradient_into_uvt():
    torch.manual_seed(0)
    gradient = torch.randn(4, 6)
    side, root = find_root(gradient, {}, Spectral(scale=1.0))
    u, _, vt = torch.linalg.svd(gradient, full_matrices=False)
    assert side == "left"
    torch.testing.assert_close(root @ root @ gradient, 6**0.5 * u @ vt, atol=1e-4, rtol=1e-4)
