"""The preconditioned Hessian has the eigenvalues of PH."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from neumann.spectrum import Hessian, MatrixOperator, Preconditioned, extremes
from tests.support.small_networks import dense_hessian, problem, vectors


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
        (torch.ones(3), ValueError, "diagonal must be of shape"),
        (torch.tensor([1.0, 0.0]), ValueError, "above 0 everywhere"),
        (torch.tensor([1.0, float("nan")]), ValueError, "above 0 everywhere"),
        ({"a": torch.ones(2)}, TypeError, "pass a flat vector of 2"),
    ],
)
def test_the_diagonal_is_checked(diagonal, error, message):
    with pytest.raises(error, match=message):
        Preconditioned(MatrixOperator(torch.eye(2)), diagonal)
    model, pair = problem()
    operator = Hessian(model, cross_entropy, batch=pair)
    with pytest.raises(ValueError, match=r"missing for 0\.weight"):
        Preconditioned(operator, {})
    names = {name: torch.ones(1) for name, _ in model.named_parameters()}
    with pytest.raises(ValueError, match=r"0\.weight must have shape"):
        Preconditioned(operator, names)
