"""Lanczos runs on matrices with known eigenvalues: Ritz values, breakdowns, noise and options."""

import gc
import math

import pytest
import torch

from neumann.spectrum import FunctionOperator, MatrixOperator, NonFiniteProduct, extremes, lanczos
from neumann.spectrum.algorithms.bounds import ritz_values
from tests.support.known_spectra import diagonal_operator, network_like, rotated_matrix


def test_shifting_the_matrix_changes_only_the_shift():
    values = network_like(500)
    plain = lanczos(diagonal_operator(values), tolerance=0.0, max_products=10)
    shifted = lanczos(diagonal_operator(values - 1), tolerance=0.0, max_products=10)
    assert torch.allclose(plain.values, shifted.values + 1, atol=1e-12)


def test_no_ghost_eigenvalues_after_200_steps_in_float32():
    values = network_like(3000)
    run = lanczos(
        diagonal_operator(values, torch.float32), tolerance=0.0, max_products=200, vectors=3
    )
    assert run.steps == 200
    for truth in values[:9]:
        assert int(((run.values - truth).abs() < 1e-3).sum()) == 1, truth
    overlaps = (run.vectors @ run.vectors.T).double()
    assert torch.allclose(overlaps, torch.eye(6, dtype=torch.float64), atol=1e-5)


def test_ritz_values_residuals_and_vectors():
    values = network_like(500)
    run = lanczos(diagonal_operator(values), tolerance=0.0, max_products=80, vectors=4)
    exact = values.sort().values
    gaps = (run.values[:, None] - exact).abs().min(1).values
    assert (gaps <= run.residuals + run.noise).all()  # some eigenvalue is that close
    assert run.vectors.shape == (8, 500)
    errors = values * run.vectors - run.vector_values[:, None] * run.vectors
    chosen = torch.cat([run.residuals[:4], run.residuals[-4:]])
    assert torch.allclose(errors.norm(dim=1), chosen, atol=1e-12)
    assert run.weights.sum() == pytest.approx(1)
    tridiagonal = ritz_values(run.diagonal.tolist(), run.off_diagonal.tolist())[0]
    assert torch.equal(tridiagonal, run.values)


def test_converged_flags_of_inner_values():
    run = lanczos(diagonal_operator(network_like(800)), tolerance=1e-3)
    assert run.converged[-3:].all()
    assert not run.converged.all()
    assert (run.residuals[run.converged] <= 1e-3).all()


def test_converged_flags_follow_relative_to():
    """An error of 5e-3 at 0.03 is within 1 % of the largest value, but not of the value itself."""
    values = torch.logspace(-6, 0, 200, dtype=torch.float64)
    options = {"tolerance": 1e-2, "max_products": 12, "ends": "both"}
    loose = lanczos(diagonal_operator(values), **options)
    strict = lanczos(diagonal_operator(values), relative_to="itself", **options)
    for run, rooms in (
        (loose, 1e-2 * loose.values.abs().max().expand_as(loose.values)),
        (strict, 1e-2 * strict.values.abs()),
    ):
        assert torch.equal(run.converged, run.residuals + run.noise <= rooms)
    assert 0 < int(strict.converged.sum()) < strict.steps
    assert (strict.residuals[~strict.converged] < 1e-2).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_low_rank_breaks_down_and_restarts(dtype):
    values = torch.zeros(60, dtype=torch.float64)
    values[:5] = torch.tensor([3.0, 3.0, 2.0, -1.0, -1.0])
    operator = MatrixOperator(rotated_matrix(values, dtype=dtype))
    found = extremes(operator)
    assert found.products <= 6  # four different eigenvalues
    assert found.converged
    assert found.largest.value == pytest.approx(3, abs=found.largest.error)
    assert found.smallest.value == pytest.approx(-1, abs=found.smallest.error)
    run = lanczos(operator, tolerance=0.0, max_products=200)
    assert run.steps == 60
    assert run.restarts >= 1
    assert torch.allclose(run.values, values.sort().values, atol=1e-5)  # with all copies


@pytest.mark.parametrize("factor", [0.0, 1.0, -2.5])
def test_multiples_of_the_identity(factor):
    operator = FunctionOperator(lambda v: factor * v, 50, dtype=torch.float64)
    found = extremes(operator)
    assert found.smallest.value == pytest.approx(factor)
    assert found.largest.value == pytest.approx(factor)
    assert found.products == 1
    assert found.converged
    run = lanczos(operator, tolerance=0.0)
    assert run.steps == 50
    assert torch.allclose(run.values, torch.full((50,), factor, dtype=torch.float64))


def test_a_function_may_return_its_argument():
    run = lanczos(FunctionOperator(lambda v: v, 20), tolerance=0.0, max_products=5)
    assert torch.allclose(run.values, torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize("size", [50, 10_000])
def test_the_identity_in_float32_needs_restarts(size):
    found = extremes(diagonal_operator(torch.full((size,), -2.5)))
    assert found.converged
    assert found.smallest.value == pytest.approx(-2.5, rel=1e-6)
    assert found.largest.value == pytest.approx(-2.5, rel=1e-6)
    assert 1 < found.products < 10
    stopped = lanczos(diagonal_operator(torch.full((size,), -2.5)), restart=False)
    assert stopped.steps == 1
    assert stopped.largest.error > found.largest.error
    assert not stopped.largest.converged


@pytest.mark.slow
def test_vectors_stay_orthogonal_across_restarts():
    values = torch.ones(10**6)
    values[7] = 1.01
    run = lanczos(diagonal_operator(values), tolerance=0.0, max_products=12, vectors=6, seed=1)
    assert run.restarts > 3
    vectors = run.vectors.double()
    overlaps = vectors @ vectors.T
    assert torch.allclose(overlaps, torch.eye(len(overlaps)).double(), atol=1e-4)
    assert run.noise < 1e-4


def test_the_seed_determines_the_start():
    operator = diagonal_operator(network_like(300))
    one, same, other = (lanczos(operator, seed=seed, max_products=5) for seed in (1, 1, 2))
    assert torch.equal(one.values, same.values)
    assert not torch.equal(one.values, other.values)
    unit = torch.zeros(300, dtype=torch.float64)
    unit[0] = 2.0
    assert lanczos(operator, start=unit).steps == 1  # an eigenvector


def test_asymmetric_products_are_measured_as_noise():
    """Products that are asymmetric by 1e-4 cannot give λ to 1e-6, and the result says so."""
    values = network_like(400)
    generator = torch.Generator().manual_seed(0)
    error = torch.randn(400, 400, generator=generator, dtype=torch.float64) * 1e-4 / 20
    operator = FunctionOperator(lambda v: values * v + error @ v, 400, dtype=torch.float64)
    found = extremes(operator, tolerance=1e-6, max_products=100)
    assert 1e-5 < found.noise < 1e-2
    assert not found.converged
    assert abs(found.largest.value - 1) <= found.largest.error
    assert extremes(diagonal_operator(values)).noise < 1e-13


def test_products_that_are_not_finite():
    operator = FunctionOperator(lambda v: v * math.nan, 10)
    with pytest.raises(NonFiniteProduct, match="NaN or infinity"):
        lanczos(operator)
    with pytest.raises(NonFiniteProduct, match="NaN or infinity"):
        operator @ torch.ones(10)

    calls = []

    def fails_later(v):
        calls.append(1)
        return v * torch.linspace(0, 1, 500) if len(calls) < 30 else v * math.inf

    with pytest.raises(NonFiniteProduct, match="product 30 "):
        lanczos(FunctionOperator(fails_later, 500), tolerance=0.0)


def test_observe_is_called_during_the_run():
    seen = []
    run = lanczos(diagonal_operator(network_like(300)), observe=lambda *what: seen.append(what))
    steps = [step for step, _, _ in seen]
    assert steps == sorted(set(steps))
    assert seen[-1] == (run.steps, run.smallest.value, run.largest.value)


def test_host_memory_gives_the_same_result():
    operator = diagonal_operator(network_like(300))
    there, here = lanczos(operator, host=True, vectors=1), lanczos(operator, vectors=1)
    assert torch.equal(there.values, here.values)
    assert torch.equal(there.vectors, here.vectors)


@pytest.mark.slow
def test_a_hundred_runs_leak_no_tensor():
    operator = diagonal_operator(network_like(1000))

    def alive():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    extremes(operator, max_products=3)
    before = alive()
    for seed in range(100):
        extremes(operator, max_products=3, seed=seed)
    assert alive() <= before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": -1.0}, "tolerance must be"),
        ({"relative_to": "nothing"}, "relative_to must be"),
        ({"ends": "middle"}, "ends must be"),
        ({"max_products": 0}, "max_products must be"),
        ({"risk": 0.0}, "risk must be"),
        ({"vectors": -1}, "vectors must be"),
        ({"start": torch.zeros(20, dtype=torch.float64)}, "start must be finite and not 0"),
        ({"start": torch.zeros(3)}, "a vector for this operator"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        lanczos(diagonal_operator(torch.ones(20, dtype=torch.float64)), **options)
