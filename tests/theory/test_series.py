"""The series against direct solves, its convergence bounds, and its errors beyond them."""

import math
import re

import pytest
import torch
from torch import Tensor

from neumann.theory.series import SeriesDiverged, solve


def symmetric(eigenvalues: list[float], seed: int = 0) -> Tensor:
    size = len(eigenvalues)
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(
        torch.randn(size, size, dtype=torch.float64, generator=generator), mode="complete"
    )
    matrix = basis @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ basis.T
    return (matrix + matrix.T) / 2


def vector(size: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, dtype=torch.float64, generator=generator)


def reported_numbers(message: str, pattern: str) -> list[float]:
    match = re.search(pattern, message)
    assert match is not None, message
    return [float(number) for number in match.groups()]


def test_the_sum_solves_the_system():
    matrix, b = symmetric([0.2, 0.7, 1.0, 1.9]), vector(4)
    answer = solve(lambda v: matrix @ v, b, tolerance=1e-13)
    torch.testing.assert_close(
        answer.solution, torch.linalg.solve(matrix, b), rtol=1e-11, atol=1e-12
    )
    assert answer.converged
    assert answer.terms == len(answer.residuals) - 1
    assert answer.residuals[0] == 1.0
    assert answer.residuals[-1] <= 1e-13 < answer.residuals[-2]


def test_partial_sums_and_residuals_match_the_definition():
    matrix, b = symmetric([0.5, 1.0, 3.0]), vector(3)
    scale, identity = 0.4, torch.eye(3, dtype=torch.float64)
    for terms in range(1, 7):
        answer = solve(lambda v: matrix @ v, b, scale=scale, tolerance=0.0, max_terms=terms)
        powers = [torch.linalg.matrix_power(identity - scale * matrix, i) for i in range(terms)]
        expected = sum(power @ (scale * b) for power in powers)
        torch.testing.assert_close(answer.solution, expected, rtol=0, atol=1e-13)
        residual = torch.linalg.matrix_power(identity - scale * matrix, terms) @ b
        assert answer.residuals[-1] == pytest.approx(float(residual.norm() / b.norm()), rel=1e-10)
        assert answer.terms == terms
        assert not answer.converged


def test_a_start_is_used_and_not_changed():
    matrix, b = symmetric([0.5, 1.5]), vector(2)
    start = vector(2, seed=5)
    kept = start.clone()
    answer = solve(lambda v: matrix @ v, b, start=start, tolerance=0.0, max_terms=1)
    torch.testing.assert_close(answer.solution, start + b - matrix @ start)
    assert torch.equal(start, kept)

    exact = torch.linalg.solve(matrix, b)
    at_once = solve(lambda v: matrix @ v, b, start=exact, tolerance=1e-10)
    assert at_once.terms == 0
    assert at_once.converged
    assert torch.equal(at_once.solution, exact)
    assert at_once.solution.data_ptr() != exact.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_shape_and_dtype_of_b(dtype):
    weights = torch.linspace(0.5, 1.5, 12, dtype=dtype).reshape(2, 3, 2)
    b = torch.arange(12, dtype=dtype).reshape(2, 3, 2)
    answer = solve(lambda v: weights * v, b, tolerance=1e-5)
    assert answer.converged
    assert answer.solution.dtype == dtype
    torch.testing.assert_close(answer.solution, b / weights, rtol=1e-4, atol=1e-4)


def test_a_zero_b_needs_no_product():
    b = torch.zeros(2, 2)
    answer = solve(lambda v: pytest.fail("matvec called"), b, start=torch.ones(2, 2))
    assert torch.equal(answer.solution, b)
    assert (answer.residuals, answer.terms, answer.converged) == ((0.0,), 0, True)


def test_an_operator_may_differentiate_and_the_solution_has_no_graph():
    matrix = symmetric([0.5, 1.5])
    point = vector(2, seed=3).requires_grad_()

    def hessian_product(v: Tensor) -> Tensor:
        loss = 0.5 * point @ matrix @ point + 0.01 * point.pow(4).sum()
        (gradient,) = torch.autograd.grad(loss, point, create_graph=True)
        return torch.autograd.grad(gradient @ v, point, create_graph=True)[0]

    b = vector(2).requires_grad_()
    answer = solve(hessian_product, b, tolerance=1e-12)
    hessian = matrix + torch.diag(0.12 * point.detach() ** 2)
    torch.testing.assert_close(answer.solution, torch.linalg.solve(hessian, b.detach()))
    assert not answer.solution.requires_grad


def test_an_eigenvalue_above_two_is_reported_with_the_right_scale():
    matrix, b = symmetric([0.5, 1.0, 5.0]), vector(3)
    with pytest.raises(SeriesDiverged) as caught:
        solve(lambda v: matrix @ v, b, scale=0.6)
    eigenvalue, bound, best = reported_numbers(
        str(caught.value),
        r"is about ([\d.]+), and all must be below 2: scale must be below ([\d.]+), "
        r"and 1/λ_max = ([\d.]+) ",
    )
    assert eigenvalue == pytest.approx(3.0, rel=1e-3)
    assert bound == pytest.approx(0.4, rel=1e-3)
    assert best == pytest.approx(0.2, rel=1e-3)
    assert solve(lambda v: matrix @ v, b, scale=0.99 * bound, max_terms=3000).converged
    assert solve(lambda v: matrix @ v, b, scale=best).converged


def test_a_huge_eigenvalue_hidden_in_b_is_still_found():
    """One term overshoots; the Rayleigh quotient of b itself would be 40."""
    diagonal = torch.tensor([1.0, 1e5], dtype=torch.float64)
    b = torch.tensor([1.0, 0.02], dtype=torch.float64)
    with pytest.raises(SeriesDiverged, match=r"at term 1 .* is about 1e\+05, .* below 2"):
        solve(lambda v: diagonal * v, b)


def test_a_negative_eigenvalue_is_reported_and_convexification_suggested():
    matrix, b = symmetric([-0.8, 1.0, 2.0]), vector(3)
    with pytest.raises(SeriesDiverged, match="convexified") as caught:
        solve(lambda v: matrix @ v, b, scale=0.5)
    scaled, own = reported_numbers(
        str(caught.value),
        r"is about (-[\d.]+), and all must be above 0: A is not positive definite "
        r"\(PA has an eigenvalue of about (-[\d.]+)\)",
    )
    assert scaled == pytest.approx(-0.4, rel=1e-3)
    assert own == pytest.approx(-0.8, rel=1e-3)

    lowest, highest = -0.9, 2.1
    mu, eta = highest / (abs(lowest) + highest), 1 / highest
    convexified = (1 - mu) * torch.eye(3, dtype=torch.float64) + mu * eta * matrix
    assert solve(lambda v: convexified @ v, b).converged


def test_growth_is_measured_from_the_smallest_residual():
    """The growing part starts at 1e-8·‖b‖ and is still far below ‖b‖ after 11 doublings."""
    diagonal = torch.tensor([1.0, -1.0], dtype=torch.float64)
    b = torch.tensor([1.0, 1e-8], dtype=torch.float64)
    with pytest.raises(SeriesDiverged, match="is about -1, and all must be above 0"):
        solve(lambda v: diagonal * v, b, tolerance=1e-12, max_terms=12)


def test_eigenvalues_on_both_sides_are_reported_as_such():
    diagonal = torch.tensor([-0.5, 2.5], dtype=torch.float64)
    with pytest.raises(SeriesDiverged, match=r"grows by a factor of 1\.5 per term .* both sides"):
        solve(lambda v: diagonal * v, torch.ones(2, dtype=torch.float64))


def test_just_inside_the_bound_converges_and_just_outside_diverges():
    b = torch.ones(1, dtype=torch.float64)
    assert solve(lambda v: 1.99 * v, b, max_terms=2000).converged
    with pytest.raises(SeriesDiverged, match="below 2"):
        solve(lambda v: 2.01 * v, b, max_terms=2000)
    with pytest.raises(SeriesDiverged, match="above 0"):
        solve(lambda v: -0.01 * v, b, max_terms=2000)


def test_a_preconditioner_converges_where_the_plain_series_diverges():
    diagonal = torch.logspace(-3, 3, 7, dtype=torch.float64)
    spread = diagonal.sqrt()
    matrix = spread[:, None] * symmetric([0.5, 0.7, 0.9, 1.0, 1.1, 1.3, 1.5]) * spread
    b = vector(7)
    with pytest.raises(SeriesDiverged, match="below 2"):
        solve(lambda v: matrix @ v, b)
    answer = solve(lambda v: matrix @ v, b, preconditioner=lambda v: v / diagonal, tolerance=1e-12)
    assert answer.converged
    torch.testing.assert_close(answer.solution, torch.linalg.solve(matrix, b), rtol=1e-9, atol=0)


def test_a_strong_preconditioner_is_judged_by_the_eigenvalues_of_pa():
    matrix, b = symmetric([0.5, 1.0]), vector(2)
    with pytest.raises(SeriesDiverged) as caught:
        solve(lambda v: matrix @ v, b, scale=2.0, preconditioner=lambda v: 3 * v)
    eigenvalue, bound = reported_numbers(
        str(caught.value), r"is about ([\d.]+), .* scale must be below ([\d.]+),"
    )
    assert eigenvalue == pytest.approx(6.0, rel=1e-3)
    assert bound == pytest.approx(2 / 3, rel=1e-3)


def test_transient_growth_is_not_divergence():
    """All eigenvalues are 0.5, but I − A is far from normal: the residual first grows."""
    matrix = torch.tensor([[0.5, -40.0], [0.0, 0.5]], dtype=torch.float64)
    b = torch.tensor([0.0, 1.0], dtype=torch.float64)
    answer = solve(lambda v: matrix @ v, b, tolerance=1e-12)
    assert max(answer.residuals) > 20
    assert answer.converged
    torch.testing.assert_close(answer.solution, torch.linalg.solve(matrix, b))


def test_a_singular_direction_stagnates():
    diagonal = torch.tensor([0.0, 1.0], dtype=torch.float64)
    b = torch.tensor([3.0, 4.0], dtype=torch.float64)
    answer = solve(lambda v: diagonal * v, b, max_terms=50)
    assert not answer.converged
    assert answer.terms == 50
    assert answer.residuals[-1] == pytest.approx(0.6)


def test_a_tolerance_below_rounding_stops_without_raising():
    matrix, b = symmetric([0.5, 1.0, 1.3]).float(), vector(3).float()
    answer = solve(lambda v: matrix @ v, b, tolerance=0.0, max_terms=300)
    assert answer.residuals[-1] < 1e-6


def test_rounding_noise_is_not_growth():
    b = torch.tensor([1.0, 0.0], dtype=torch.float64)
    noise = iter([1e-22, 1e-17])
    answer = solve(lambda v: v + v.new_tensor([0.0, next(noise)]), b, tolerance=0.0, max_terms=2)
    assert answer.residuals == pytest.approx((1.0, 1e-22, 1e-17), rel=1e-4, abs=0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_detected(value):
    b = torch.ones(2)
    with pytest.raises(SeriesDiverged, match="not finite at term 1"):
        solve(lambda v: v * value, b)
    with pytest.raises(SeriesDiverged, match="not finite at term 0"):
        solve(lambda v: v * value, b, start=torch.ones(2))
    with pytest.raises(ValueError, match="b must be finite"):
        solve(lambda v: v, b * value)
    with pytest.raises(ValueError, match="start must be finite"):
        solve(lambda v: v, b, start=b * value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scale", 0.0),
        ("scale", -1.0),
        ("scale", math.nan),
        ("scale", math.inf),
        ("tolerance", -1e-3),
        ("tolerance", math.nan),
        ("max_terms", 0),
        ("max_terms", 3.0),
        ("max_terms", True),
    ],
)
def test_bad_arguments_are_named_with_their_value(name, value):
    with pytest.raises(ValueError, match=f"{name} must .*got {value!r}"):
        solve(lambda v: v, torch.ones(2), **{name: value})


def test_mismatched_tensors_are_refused():
    b = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"start must be like b.*\(6,\)"):
        solve(lambda v: v, b, start=torch.ones(6))
    with pytest.raises(ValueError, match=r"start must be like b.*float64"):
        solve(lambda v: v, b, start=b.double())
    with pytest.raises(ValueError, match=r"matvec returned shape \(3,\)"):
        solve(lambda v: v[0], b)
    with pytest.raises(ValueError, match=r"preconditioner returned .*float64"):
        solve(lambda v: v, b, preconditioner=lambda v: v.double())
    with pytest.raises(ValueError, match=r"b must be float32 or float64, got torch\.int64"):
        solve(lambda v: v, torch.ones(2, dtype=torch.int64))
