"""λ_min and λ_max with their errors: on known spectra and on a hundred small networks."""

import json

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from neumann.spectrum import Differences, Hessian, MatrixOperator, extremes
from tests.support.known_spectra import (
    SPECTRA,
    diagonal_operator,
    log_spaced,
    network_like,
    rotated_matrix,
)
from tests.support.small_networks import (
    as_type,
    batch,
    cnn,
    dense_hessian,
    mlp,
    problem,
    trained,
)

NETWORKS, GROUP = 30, 10  # tests/soak draws thousands more


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", SPECTRA)
def test_both_ends_of_known_spectra(kind, dtype):
    for seed in range(5):
        values = SPECTRA[kind](600, seed)
        found = extremes(diagonal_operator(values, dtype), seed=seed)
        assert found.converged
        for end, truth in ((found.smallest, values.min()), (found.largest, values.max())):
            assert abs(end.value - float(truth)) <= end.error
            assert end.error <= 1e-3 * float(values.abs().max())


def test_ten_steps_miss_the_smallest_eigenvalue_and_say_so():
    values = network_like(2000)
    few = extremes(diagonal_operator(values), tolerance=0.0, max_products=10)
    assert abs(few.largest.value - 1) < 1e-3
    assert few.smallest.value > -0.05
    assert few.smallest.value - few.smallest.error <= -0.06
    assert not few.converged
    enough = extremes(diagonal_operator(values))
    assert enough.converged
    assert enough.smallest.value == pytest.approx(-0.06, abs=1e-3)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=1, max_size=12),
    st.integers(0, 1000),
)
@example([0.0, 8e-243], 0)  # whose squares underflow
def test_small_matrices_are_solved_exactly(eigenvalues, seed):
    values = torch.tensor(eigenvalues, dtype=torch.float64)
    found = extremes(MatrixOperator(rotated_matrix(values, seed)), seed=seed, tolerance=1e-10)
    slack = 1e-12 * float(values.abs().max()) + 1e-300
    for end, truth in ((found.smallest, values.min()), (found.largest, values.max())):
        assert abs(end.value - float(truth)) <= end.error + slack
        assert end.error <= 1e-9 * float(values.abs().max()) + 1e-300


def test_one_end_costs_less():
    operator = diagonal_operator(network_like(1000))
    both, top = extremes(operator), extremes(operator, ends="largest")
    assert top.products < both.products
    assert top.largest.converged
    assert top.largest.value == pytest.approx(1, abs=1e-3)


def test_converged_refers_to_the_requested_end():
    generator = torch.Generator().manual_seed(0)
    values = 0.01 * torch.randn(1000, generator=generator, dtype=torch.float64)
    values[:3] = torch.tensor([1.0, 0.8, -0.06])
    top = extremes(diagonal_operator(values), ends="largest")
    assert top.ends == "largest"
    assert top.converged
    assert top.largest.converged
    assert not top.smallest.converged
    assert top.as_dict()["ends"] == "largest"
    bottom = extremes(diagonal_operator(-values), ends="smallest")
    assert bottom.converged
    assert not bottom.largest.converged
    both = extremes(diagonal_operator(values), max_products=top.products)
    assert both.ends == "both"
    assert not both.converged


def test_relative_to_itself_is_stricter():
    operator = diagonal_operator(network_like(1000))
    loose, strict = extremes(operator), extremes(operator, relative_to="itself")
    assert strict.products > loose.products
    assert strict.smallest.error <= 1e-3 * abs(strict.smallest.value) * (1 + 1e-9)


def test_max_products_is_respected():
    found = extremes(diagonal_operator(log_spaced(2000)), max_products=7)
    assert found.products == 7
    assert not found.converged
    assert found.smallest.error > found.smallest.tolerance > 0


def test_asymmetric_matrices_do_not_converge_even_in_the_whole_space():
    square = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rotation = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    for matrix in (square, rotation):
        found = extremes(MatrixOperator(matrix))
        assert found.steps == len(matrix)
        assert found.largest.error > found.largest.tolerance
        assert not found.converged
    assert extremes(MatrixOperator(square + square.T)).converged


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_products_converge_to_any_tolerance_in_the_whole_space(dtype):
    square = torch.randn(30, 30, generator=torch.Generator().manual_seed(0), dtype=dtype)
    for tolerance in (0.0, 1e-15):
        found = extremes(MatrixOperator(square + square.T), tolerance=tolerance)
        assert found.steps == 30
        assert found.converged


def test_differences_keep_their_noise_in_the_whole_space():
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    x = torch.tensor([[1.0, 2.0], [0.5, -1.0]])

    def loss(outputs, targets):
        return (30 * outputs).sin().mean()

    found = extremes(Differences(model, loss, batch=(x, x), step=0.05))
    assert found.steps == 2
    assert found.noise > found.largest.tolerance
    assert not found.converged


def case(number):
    """Return a network of up to 2,000 parameters, some of them trained, and its data."""
    generator = torch.Generator().manual_seed(number)

    def pick(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    torch.manual_seed(number)
    norm, classes, examples = number % 2 == 0, pick(2, 6), pick(12, 40)
    if number % 5 == 4:
        model, shape = cnn(pick(3, 7), classes, norm=norm), (1, 6, 6)
    else:
        wide = number % 10 == 0
        inputs, hidden = (pick(30, 40), pick(30, 40)) if wide else (pick(3, 14), pick(4, 20))
        model = mlp(inputs, hidden, classes, norm=norm, layers=pick(1, 2) if not wide else 1)
        shape = (inputs,)
    pair = batch(examples, *shape, classes=classes, seed=number)
    model = trained(model.double(), pair, pick(0, 1) * pick(5, 40))
    return model, pair


@pytest.mark.slow
@pytest.mark.parametrize("group", range(NETWORKS // GROUP))
def test_both_ends_of_networks_are_within_their_errors(group):
    for number in range(group * GROUP, (group + 1) * GROUP):
        model, pair = case(number)
        size = sum(p.numel() for p in model.parameters())
        assert size <= 2000
        dtype = (torch.float64, torch.float32)[number // 2 % 2]
        model, pair = model.to(dtype), as_type(pair, dtype)
        exact = torch.linalg.eigvalsh(dense_hessian(model, pair))
        operator = Hessian(model, cross_entropy, batch=pair)
        found = extremes(operator, seed=number, max_products=size)
        assert found.converged, number
        for end, truth in ((found.smallest, exact[0]), (found.largest, exact[-1])):
            assert abs(end.value - float(truth)) <= end.error, (number, end, truth)
            assert end.error <= 1e-3 * float(exact.abs().max()), (number, end)


@pytest.mark.slow
def test_errors_hold_after_any_number_of_steps():
    """After any number of steps the true value is within the stated error."""
    for number in range(8):
        model, pair = case(number)
        exact = torch.linalg.eigvalsh(dense_hessian(model, pair))
        operator = Hessian(model, cross_entropy, batch=pair)
        with operator.session():
            for steps in (2, 4, 8, 16, 32):
                found = extremes(operator, tolerance=0.0, max_products=steps, seed=number)
                assert found.products <= steps
                for end, truth in ((found.smallest, exact[0]), (found.largest, exact[-1])):
                    assert abs(end.value - float(truth)) <= end.error


def test_results_convert_to_json():
    model, pair = problem()
    found = extremes(Hessian(model, cross_entropy, batch=pair, weight_decay=0.01))
    record = json.loads(json.dumps(found.as_dict()))
    assert record["largest"]["value"] == found.largest.value
    assert record["about"]["matrix"] == "hessian"
    assert record["about"]["dtype"] == "torch.float64"
    assert record["about"]["examples"] == 14
    assert record["about"]["weight_decay"] == 0.01
    assert record["products"] == found.products
