"""The relatives of the Hessian: Gauss–Newton and what a preconditioner makes of it."""

import pytest
import torch
from small_networks import batch, dense_hessian, problem, vectors
from torch import nn
from torch.func import functional_call, grad, jacrev
from torch.nn.functional import cross_entropy

from neumann.spectrum import (
    GaussNewton,
    Hessian,
    MatrixOperator,
    Objective,
    Preconditioned,
    extremes,
)


def test_gauss_newton_is_its_definition():
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


def test_gauss_newton_wants_one_tensor():
    model, pair = problem()
    objective = Objective(lambda m, b: (m(b[0]), 0), lambda out, b: cross_entropy(out[0], b[1]))
    with pytest.raises(TypeError, match="returns one tensor"):
        GaussNewton(model, objective, batch=pair) @ torch.ones(57 + 12, dtype=torch.float64)


def test_preconditioned_has_the_eigenvalues_of_the_product():
    model, pair = problem()
    operator = Hessian(model, cross_entropy, batch=pair)
    diagonal = vectors(operator.size, 1)[:, 0].abs() + 0.1
    product = torch.diag(diagonal) @ dense_hessian(model, pair)
    expected = torch.linalg.eigvals(product).real.sort().values
    ours = Preconditioned(operator, diagonal)
    assert torch.allclose(torch.linalg.eigvalsh(ours.dense()), expected, atol=1e-10)
    found = extremes(ours)
    assert abs(found.largest.value - float(expected[-1])) <= found.largest.error
    assert found.about.matrix == "preconditioned hessian"
    by_name = {n: torch.full_like(p, 4.0) for n, p in model.named_parameters()}
    four = Preconditioned(operator, by_name)
    v = vectors(operator.size, 1)[:, 0]
    assert torch.allclose(four @ v, 4 * (operator @ v))


@pytest.mark.parametrize(
    ("diagonal", "error", "message"),
    [
        (torch.ones(3), ValueError, "diagonal must have shape"),
        (torch.tensor([1.0, 0.0]), ValueError, "above 0 everywhere"),
        (torch.tensor([1.0, float("nan")]), ValueError, "above 0 everywhere"),
        ({"a": torch.ones(2)}, TypeError, "pass a flat vector of 2"),
    ],
)
def test_preconditioners_are_checked(diagonal, error, message):
    with pytest.raises(error, match=message):
        Preconditioned(MatrixOperator(torch.eye(2)), diagonal)
    model, pair = problem()
    operator = Hessian(model, cross_entropy, batch=pair)
    with pytest.raises(ValueError, match=r"missing for 0\.weight"):
        Preconditioned(operator, {})
    names = {name: torch.ones(1) for name, _ in model.named_parameters()}
    with pytest.raises(ValueError, match=r"0\.weight must have shape"):
        Preconditioned(operator, names)
