"""Conjugate gradients against dense solutions, in float64."""

import pytest
import torch

from neumann.theory.conjugate_gradients import solve

SIZE = 12


def system(low: float, high: float):
    """Return a matrix with eigenvalues from low to high, evenly spaced, and a right-hand side."""
    generator = torch.Generator().manual_seed(0)
    square = torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64)
    basis, _ = torch.linalg.qr(square, mode="complete")
    matrix = basis @ torch.diag(torch.linspace(low, high, SIZE, dtype=torch.float64)) @ basis.T
    b = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    return (matrix + matrix.T) / 2, b


@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(SIZE,), (3, 4)])
def test_it_solves_the_damped_system(damping, shape):
    matrix, b = system(0.1, 4.0)
    found = solve(
        lambda v: (matrix @ v.reshape(-1)).reshape(shape),
        b.reshape(shape),
        damping=damping,
        tolerance=1e-13,
        max_products=3 * SIZE,
    )
    expected = torch.linalg.solve(matrix + damping * torch.eye(SIZE, dtype=torch.float64), b)
    torch.testing.assert_close(found.solution.reshape(-1), expected, rtol=0, atol=1e-11)
    assert found.end == "converged"
    assert found.products <= SIZE + 3


@pytest.mark.parametrize("products", [1, 2, 5])
def test_it_minimizes_over_the_krylov_space(products):
    matrix, b = system(0.1, 4.0)
    found = solve(lambda v: matrix @ v, b, tolerance=0.0, max_products=products)
    powers = torch.stack([torch.linalg.matrix_power(matrix, k) @ b for k in range(products)], 1)
    best = powers @ torch.linalg.solve(powers.T @ matrix @ powers, powers.T @ b)
    torch.testing.assert_close(found.solution, best, rtol=0, atol=1e-10)
    assert (found.products, found.end) == (products, "max_products")
    residual = (b - matrix @ found.solution).norm() / b.norm()
    assert found.residual == pytest.approx(float(residual))


def test_negative_curvature_ends_it_where_it_is():
    matrix, b = system(-1.0, 4.0)
    found = solve(lambda v: matrix @ v, b, tolerance=0.0, max_products=3 * SIZE)
    assert found.end == "negative curvature"
    assert 1 < found.products < SIZE
    shorter = solve(lambda v: matrix @ v, b, tolerance=0.0, max_products=found.products - 1)
    assert torch.equal(found.solution, shorter.solution)
    first = solve(lambda v: -v, b)
    assert (first.products, first.end) == (1, "negative curvature")
    assert torch.equal(first.solution, b)
    assert first.residual == pytest.approx(2.0)  # ‖b + b‖ / ‖b‖
    damped = solve(lambda v: matrix @ v, b, damping=1.5, tolerance=1e-12, max_products=3 * SIZE)
    assert damped.end == "converged"


def test_nothing_to_solve():
    zero = torch.zeros(3, dtype=torch.float64)
    found = solve(lambda v: pytest.fail("a product was computed"), zero)
    assert (found.products, found.end) == (0, "converged")
    assert torch.equal(found.solution, zero)


@pytest.mark.parametrize(
    ("name", "value"),
    [("damping", -1.0), ("tolerance", float("nan")), ("max_products", 0), ("max_products", 2.0)],
)
def test_bad_arguments_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .* got {value!r}"):
        solve(lambda v: v, torch.ones(2), **{name: value})
