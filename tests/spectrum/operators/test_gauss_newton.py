"""The Gauss–Newton matrix against its definition."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev
from torch.nn.functional import cross_entropy

from neumann.spectrum import GaussNewton, Hessian, Objective, extremes
from tests.support.small_networks import batch, problem, vectors


def test_gauss_newton_matches_its_definition():
    model, (x, y) = problem(norm=False)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    jacobian = jacrev(lambda w: functional_call(model, w, (x,)))(weights)
    j = torch.cat([part.reshape(x.shape[0] * 3, -1) for part in jacobian.values()], 1)
    outputs = model(x).detach().reshape(-1)
    curvature = jacrev(grad(lambda f: cross_entropy(f.view(-1, 3), y)))(outputs)
    operator = GaussNewton(model, cross_entropy, batch=(x, y))
    assert torch.allclose(operator.dense(), j.T @ curvature @ j, atol=1e-12)
    assert extremes(operator).smallest.value > -1e-12
    assert operator.about.matrix == "gauss-newton"


def test_gauss_newton_of_a_linear_model_is_the_hessian():
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    pair = batch(9, 4)
    v = vectors(15)
    ours = GaussNewton(model, cross_entropy, batch=pair) @ v
    assert torch.allclose(ours, Hessian(model, cross_entropy, batch=pair) @ v, atol=1e-14)


def test_gauss_newton_needs_a_single_output():
    model, pair = problem()
    objective = Objective(lambda m, b: (m(b[0]), 0), lambda out, b: cross_entropy(out[0], b[1]))
    with pytest.raises(TypeError, match="returns one tensor"):
        GaussNewton(model, objective, batch=pair) @ torch.ones(57 + 12, dtype=torch.float64)
