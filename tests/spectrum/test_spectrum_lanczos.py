"""Lanczos on matrices whose eigenvalues are known: ends, copies, noise, breakdowns and memory."""

import gc
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from neumann.spectrum import FunctionOperator, MatrixOperator, NonFiniteProduct, extremes, lanczos
from neumann.spectrum.basis import ROWS, Basis, sliced_product
from neumann.spectrum.start import random_unit
from neumann.spectrum.tridiagonal import most_plausible, outer_bound, ritz


def rotated(values, seed=0, dtype=torch.float64):
    """A symmetric matrix with these eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    square = torch.randn(len(values), len(values), generator=generator, dtype=torch.float64)
    q, _ = torch.linalg.qr(square)
    matrix = q @ torch.diag(values) @ q.T
    return ((matrix + matrix.T) / 2).to(dtype)


def diagonal(values, dtype=torch.float64):
    kept = values.to(dtype)
    return FunctionOperator(lambda v: kept * v, len(values), dtype=dtype)


def network_like(size, seed=0):
    """A bulk near 0, a few large outliers, and negative ones not far below the bulk."""
    generator = torch.Generator().manual_seed(seed)
    values = 0.01 * torch.randn(size, generator=generator, dtype=torch.float64)
    values[:9] = torch.logspace(-0.5, 0, 9, dtype=torch.float64)
    values[9:12] = torch.tensor([-0.06, -0.058, -0.05], dtype=torch.float64)
    return values


def clustered(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(size, generator=generator, dtype=torch.float64)
    return torch.where(torch.arange(size) % 3 == 0, 1 - 4e-3 * noise, -1 + 4e-3 * noise)


def close_pairs(size, seed=0):
    """Two eigenvalues at either end, 2.5 tolerances apart: the second is found first, often."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(size, generator=generator, dtype=torch.float64) / 2
    values[:4] = torch.tensor([1, 1 - 2.5e-3, -1, -1 + 2.5e-3], dtype=torch.float64)
    return values


def wide(size, seed=0):
    signs = 1 - 2 * (torch.arange(size) % 2)
    return signs * torch.logspace(-12, 0, size, dtype=torch.float64)


SPECTRA = {
    "network-like": network_like,
    "clustered": clustered,
    "close pairs": close_pairs,
    "wide": wide,
    "indefinite": lambda size, seed=0: torch.linspace(-1, 1, size, dtype=torch.float64),
    "negative": lambda size, seed=0: -torch.linspace(0.5, 3, size, dtype=torch.float64),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", SPECTRA)
def test_ends_of_known_spectra(kind, dtype):
    for seed in range(5):
        values = SPECTRA[kind](600, seed)
        found = extremes(diagonal(values, dtype), seed=seed)
        assert found.converged
        for end, truth in ((found.smallest, values.min()), (found.largest, values.max())):
            assert abs(end.value - float(truth)) <= end.error
            assert end.error <= 1e-3 * float(values.abs().max())


def test_ten_steps_are_not_enough_for_the_smallest_and_say_so():
    values = network_like(2000)
    few = extremes(diagonal(values), tolerance=0.0, max_products=10)
    assert abs(few.largest.value - 1) < 1e-3
    assert few.smallest.value > -0.05
    assert few.smallest.value - few.smallest.error <= -0.06
    assert not few.converged
    enough = extremes(diagonal(values))
    assert enough.converged
    assert enough.smallest.value == pytest.approx(-0.06, abs=1e-3)


def test_a_shift_changes_nothing():
    values = network_like(500)
    plain = lanczos(diagonal(values), tolerance=0.0, max_products=10)
    shifted = lanczos(diagonal(values - 1), tolerance=0.0, max_products=10)
    assert torch.allclose(plain.values, shifted.values + 1, atol=1e-12)


def test_the_stated_risk_is_kept():
    """A start that misses an end is as rare as stated: at a risk of 0.2, and much rarer in fact."""
    values, runs = close_pairs(300), 150
    missed = 0
    for seed in range(runs):
        found = extremes(diagonal(values), seed=seed, risk=0.2)
        missed += abs(found.largest.value - 1) > found.largest.error
    assert missed / runs < 0.2


def test_outer_bound_reaches_what_the_start_has_little_of():
    """With a known share of the start, an eigenvalue never lies beyond the bound for that share."""
    values = network_like(400, seed=3)
    run = lanczos(diagonal(values), tolerance=0.0, max_products=12, seed=3)
    start = random_unit(400, 3, torch.float64, torch.device("cpu"))
    share = float(start[int(values.argmin())] ** 2)
    beyond = outer_bound(
        (-run.diagonal).tolist(), run.beside.tolist(), -run.smallest.value, 1 / share
    )
    assert run.smallest.value - beyond <= float(values.min()) <= run.smallest.value
    assert most_plausible(400, 0.01) > 1 / share


def test_no_ghosts_after_200_steps_in_float32():
    values = network_like(3000)
    run = lanczos(diagonal(values, torch.float32), tolerance=0.0, max_products=200, vectors=3)
    assert run.steps == 200
    for truth in values[:9]:
        assert int(((run.values - truth).abs() < 1e-3).sum()) == 1, truth
    overlaps = (run.vectors @ run.vectors.T).double()
    assert torch.allclose(overlaps, torch.eye(6, dtype=torch.float64), atol=1e-5)


def test_ritz_values_residuals_and_vectors():
    values = network_like(500)
    run = lanczos(diagonal(values), tolerance=0.0, max_products=80, vectors=4)
    exact = values.sort().values
    gaps = (run.values[:, None] - exact).abs().min(1).values
    assert (gaps <= run.residuals + run.noise).all()  # some eigenvalue is that near
    assert run.vectors.shape == (8, 500)
    errors = values * run.vectors - run.vector_values[:, None] * run.vectors
    chosen = torch.cat([run.residuals[:4], run.residuals[-4:]])
    assert torch.allclose(errors.norm(dim=1), chosen, atol=1e-12)
    assert run.weights.sum() == pytest.approx(1)
    tridiagonal = ritz(run.diagonal.tolist(), run.beside.tolist())[0]
    assert torch.equal(tridiagonal, run.values)


def test_converged_flags_of_inner_values():
    run = lanczos(diagonal(network_like(800)), tolerance=1e-3)
    assert run.converged[-3:].all()
    assert not run.converged.all()
    assert (run.residuals[run.converged] <= 1e-3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_low_rank_breaks_down_and_goes_on(dtype):
    values = torch.zeros(60, dtype=torch.float64)
    values[:5] = torch.tensor([3.0, 3.0, 2.0, -1.0, -1.0])
    operator = MatrixOperator(rotated(values, dtype=dtype))
    found = extremes(operator)
    assert found.products <= 6  # four different eigenvalues
    assert found.converged
    assert found.largest.value == pytest.approx(3, abs=found.largest.error)
    assert found.smallest.value == pytest.approx(-1, abs=found.smallest.error)
    run = lanczos(operator, tolerance=0.0, max_products=200)
    assert run.steps == 60
    assert run.restarts >= 1
    assert torch.allclose(run.values, values.sort().values, atol=1e-5)  # copies too


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


def test_a_function_that_returns_its_argument_is_safe():
    run = lanczos(FunctionOperator(lambda v: v, 20), tolerance=0.0, max_products=5)
    assert torch.allclose(run.values, torch.ones(5, dtype=torch.float64))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=1, max_size=12),
    st.integers(0, 1000),
)
@example([0.0, 8e-243], 0)  # whose squares are no numbers
def test_small_matrices_are_solved_whole(eigenvalues, seed):
    values = torch.tensor(eigenvalues, dtype=torch.float64)
    found = extremes(MatrixOperator(rotated(values, seed)), seed=seed, tolerance=1e-10)
    slack = 1e-12 * float(values.abs().max()) + 1e-300
    for end, truth in ((found.smallest, values.min()), (found.largest, values.max())):
        assert abs(end.value - float(truth)) <= end.error + slack
        assert end.error <= 1e-9 * float(values.abs().max()) + 1e-300


def test_one_end_costs_less():
    operator = diagonal(network_like(1000))
    both, top = extremes(operator), extremes(operator, ends="largest")
    assert top.products < both.products
    assert top.largest.converged
    assert top.largest.value == pytest.approx(1, abs=1e-3)


def test_relative_to_itself_is_stricter_for_the_smaller_end():
    operator = diagonal(network_like(1000))
    loose, strict = extremes(operator), extremes(operator, relative_to="itself")
    assert strict.products > loose.products
    assert strict.smallest.error <= 1e-3 * abs(strict.smallest.value) * (1 + 1e-9)


def test_the_start_is_the_seed():
    operator = diagonal(network_like(300))
    one, same, other = (lanczos(operator, seed=seed, max_products=5) for seed in (1, 1, 2))
    assert torch.equal(one.values, same.values)
    assert not torch.equal(one.values, other.values)
    unit = torch.zeros(300, dtype=torch.float64)
    unit[0] = 2.0
    assert lanczos(operator, start=unit).steps == 1  # an eigenvector


def test_the_budget_is_kept():
    found = extremes(diagonal(wide(2000)), max_products=7)
    assert found.products == 7
    assert not found.converged
    assert found.smallest.error > found.smallest.tolerance > 0


def test_noise_is_measured_and_part_of_the_error():
    """Products that are asymmetric by 1e-4 cannot give a λ to 1e-6, and do not claim to."""
    values = network_like(400)
    generator = torch.Generator().manual_seed(0)
    error = torch.randn(400, 400, generator=generator, dtype=torch.float64) * 1e-4 / 20
    operator = FunctionOperator(lambda v: values * v + error @ v, 400, dtype=torch.float64)
    found = extremes(operator, tolerance=1e-6, max_products=100)
    assert 1e-5 < found.noise < 1e-2
    assert not found.converged
    assert abs(found.largest.value - 1) <= found.largest.error
    assert extremes(diagonal(values)).noise < 1e-13


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


def test_observers_see_the_run():
    seen = []
    run = lanczos(diagonal(network_like(300)), observe=lambda *what: seen.append(what))
    steps = [step for step, _, _ in seen]
    assert steps == sorted(set(steps))
    assert seen[-1] == (run.steps, run.smallest.value, run.largest.value)


def test_the_host_holds_the_same_basis():
    operator = diagonal(network_like(300))
    there, here = lanczos(operator, host=True, vectors=1), lanczos(operator, vectors=1)
    assert torch.equal(there.values, here.values)
    assert torch.equal(there.vectors, here.vectors)


def test_memory_grows_with_the_steps_and_not_more():
    for steps in (1, ROWS, ROWS + 1, 100):
        basis = Basis(10, torch.float32, torch.device("cpu"), host=False)
        for _ in range(steps):
            basis.append(torch.zeros(10))
        held = sum(block.numel() for block in basis.blocks)
        assert 10 * steps <= held < 10 * (steps + ROWS)
    basis.truncate(ROWS)
    assert len(basis.blocks) == 1


def test_nothing_is_left_after_a_hundred_runs():
    operator = diagonal(network_like(1000))

    def alive():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    extremes(operator, max_products=3)
    before = alive()
    for seed in range(100):
        extremes(operator, max_products=3, seed=seed)
    assert alive() <= before


def test_slices_make_the_same_product():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 256 * 7 + 13, generator=generator, dtype=torch.float64)
    vector = torch.randn(rows.shape[1], generator=generator, dtype=torch.float64)
    assert torch.allclose(sliced_product(rows, vector), rows @ vector)
    assert torch.allclose(
        sliced_product(rows[:3].float(), vector.float()).float(),
        rows[:3].float() @ vector.float(),
        atol=1e-4,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": -1.0}, "tolerance must be"),
        ({"relative_to": "nothing"}, "relative_to must be"),
        ({"ends": "middle"}, "ends must be"),
        ({"max_products": 0}, "max_products must be"),
        ({"risk": 0.0}, "risk must lie"),
        ({"vectors": -1}, "vectors must be"),
        ({"start": torch.zeros(20, dtype=torch.float64)}, "start must be finite and not 0"),
        ({"start": torch.zeros(3)}, "a vector for this operator"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        lanczos(diagonal(torch.ones(20, dtype=torch.float64)), **options)


def test_operators_check_what_they_are_given():
    with pytest.raises(ValueError, match="matrix must be square"):
        MatrixOperator(torch.ones(2, 3))
    with pytest.raises(ValueError, match="float32 or float64"):
        MatrixOperator(torch.eye(3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="at least 1 row"):
        FunctionOperator(lambda v: v, 0)
    operator = MatrixOperator(rotated(torch.arange(4, dtype=torch.float64)))
    with pytest.raises(ValueError, match="a vector for this operator"):
        operator @ torch.ones(5, dtype=torch.float64)
    with pytest.raises(ValueError, match="a vector for this operator"):
        operator @ torch.ones(4)
    with pytest.raises(ValueError, match="a vector for this operator"):
        operator @ torch.ones(5, 2, dtype=torch.float64)
    assert torch.allclose(operator.dense(), operator.matrix)
    assert (operator @ torch.ones(4, 0, dtype=torch.float64)).shape == (4, 0)
    with pytest.raises(ValueError, match="a vector for this operator"):
        FunctionOperator(lambda v: v[:2], 3) @ torch.ones(3)
