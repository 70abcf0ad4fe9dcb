"""The arm `cg` against dense solutions, in float64."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from neumann.lab.optimizers.newton_cg import CURVATURES, TruncatedNewton


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
def test_a_step_solves_the_damped_newton_system(curvature, weight_decay):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(20, 3).double(), torch.arange(20) % 2
    matrix = CURVATURES[curvature](model, cross_entropy, batch=(x, y))
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    dense = matrix.dense() + (1.5 + weight_decay) * torch.eye(len(start)).double()
    optimizer = TruncatedNewton(
        model.parameters(),
        lr=0.7,
        curvature=curvature,
        damping=1.5,
        tolerance=1e-13,
        max_products=100,
        weight_decay=weight_decay,
    )

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    loss = optimizer.step(closure, matrix)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()]) + weight_decay * start
    expected = start - 0.7 * torch.linalg.solve(dense, gradient)
    found = nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    assert optimizer.last.end == "converged"
    nn.utils.vector_to_parameters(start, model.parameters())
    assert loss.item() == cross_entropy(model(x), y).item()


def test_what_a_step_needs():
    parameter = nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match="needs a closure and the curvature"):
        TruncatedNewton([parameter], lr=1.0).step()
    groups = [{"params": [parameter]}, {"params": [nn.Parameter(torch.ones(1))]}]
    with pytest.raises(ValueError, match="params must be one parameter group, got 2"):
        TruncatedNewton(groups, lr=1.0)
