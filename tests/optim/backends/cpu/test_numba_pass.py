"""The CPU kernel against the readable update: phases, dtypes, and what is not finite."""

import pytest
import torch

pytest.importorskip("numba")

from neumann.optim.phases import Phase, choose_coefficients
from neumann.optim.tensors import Tensors
from tests.support.cpu_passes import (
    BF16,
    C64,
    C128,
    COEFFICIENTS,
    F16,
    F32,
    F64,
    FORCE,
    TOLERANCE,
    bits,
    check,
    exact,
    lists_of,
    run_pass,
    squares_of,
    tensors_of,
)


# Each case is compiled once for every phase. Together they have each term present and absent.
@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize(
    ("offsets", "decay", "maximize"),
    [
        ("force", "no decay", False),
        ("force", "L2", True),
        ("force", "decoupled", False),
        ("no force", "L2", False),
        ("no offsets", "decoupled", True),
        ("no offsets", "no decay", False),
    ],
)
def test_phases_and_decays(phase, offsets, decay, maximize):
    coefficients = choose_coefficients(phase, 0.1, 0.9, 0.99, 0.03 if decay == "decoupled" else 0.0)
    check(
        tensors_of(offsets=offsets != "no offsets"),
        coefficients,
        0.0 if offsets == "no force" else FORCE,
        weight_decay=0.03 if decay == "L2" else 0.0,
        maximize=maximize,
    )


@pytest.mark.parametrize("coefficients", COEFFICIENTS.values(), ids=COEFFICIENTS)
def test_rows_with_zeros(coefficients):
    check(tensors_of(), coefficients)


@pytest.mark.parametrize("phase", Phase)
def test_gradient_scale(phase):
    check(
        tensors_of(),
        choose_coefficients(phase, 0.1, 0.9, 0.99, 0.0),
        grad_scale=1 / 1024,
        weight_decay=0.5,
    )


DTYPES = [
    (F64, F64, F64),
    (F32, F32, BF16),
    (BF16, BF16, BF16),
    (BF16, BF16, F32),
    (F16, F16, F16),
    (F16, F16, F32),
    (F16, F16, BF16),
    (F32, F32, F16),
    (F32, F32, F64),
    (F64, F64, F32),
    (F64, F64, BF16),
    (BF16, F32, BF16),
    (F32, BF16, F32),
    (F32, F16, F32),
    (F32, F64, F32),
    (C64, C64, C64),
    (C128, C128, C128),
    (C64, C64, C128),
]
# Compiling takes a second for each combination and phase, so the rarer ones run a single phase.
DTYPES_AND_PHASES = [
    (*dtypes, phase)
    for number, dtypes in enumerate(DTYPES)
    for phase in (Phase if number < 3 else [Phase.ITERATE])
]


@pytest.mark.parametrize(("weight", "gradient", "state", "phase"), DTYPES_AND_PHASES)
def test_dtypes(weight, gradient, state, phase):
    tensors = tensors_of((0, 1, 7, 8193), weight, gradient, state)
    check(tensors, choose_coefficients(phase, 0.1, 0.9, 0.99, 0.0))


@pytest.mark.parametrize(
    ("weight", "phase"),
    [*((F32, phase) for phase in Phase), *((weight, Phase.ITERATE) for weight in (F64, BF16, F16))],
)
def test_stochastic_rounding_goes_to_a_neighbor(weight, phase):
    tensors = tensors_of((0, 1, 7, 8193), weight, state=BF16)
    coefficients = choose_coefficients(phase, 0.1, 0.9, 0.99, 0.0)
    expected = exact(tensors, coefficients, FORCE)
    squared = run_pass(tensors, coefficients, FORCE, rounding="stochastic", seed=7)
    for name, ours in lists_of(tensors).items():
        for tensor, truth in zip(ours, lists_of(expected)[name], strict=True):
            bound = 2 * TOLERANCE[tensor.dtype] * truth.abs() + 1e-6
            assert bool(((tensor.to(F64) - truth).abs() <= bound).all())
    assert squared == pytest.approx(squares_of(tensors), rel=1e-12)


def test_all_dtypes_at_once():
    mixed = [tensors_of((5, 9000), dtype) for dtype in (F32, C64, BF16, F64, F16)]
    check(
        Tensors(
            [t for tensors in mixed for t in tensors.weights],
            [t for tensors in mixed for t in tensors.gradients],
            [t for tensors in mixed for t in tensors.iterates],
            [t for tensors in mixed for t in tensors.offsets],
        ),
        COEFFICIENTS["iterate"],
    )


@pytest.mark.slow
def test_many_tensors():
    check(tensors_of([(100 + index % 37,) for index in range(3000)]), COEFFICIENTS["iterate"])


def test_no_tensors():
    assert run_pass(Tensors(offsets=[]), COEFFICIENTS["iterate"], 0.0) == 0.0


def test_a_nan_does_not_survive_a_reset():
    for weight, state in ((F32, F32), (F32, BF16), (F16, F16)):
        tensors = tensors_of((1000,), weight, state=state)
        tensors.iterates[0].fill_(torch.nan)
        check(tensors, COEFFICIENTS["reset"])


@pytest.mark.parametrize("offsets", [True, False])
def test_a_reset_moves_no_weight(offsets):
    tensors = tensors_of((1000, 3), offsets=offsets)
    for gradient in tensors.gradients:
        gradient.fill_(torch.inf)
    before = bits(tensors)
    run_pass(tensors, COEFFICIENTS["reset"], FORCE)
    after = bits(tensors)
    assert after[:2] == before[:2]
    assert after[4:] == before[4:]
    assert all(bool((m == -torch.inf).all()) for m in tensors.iterates)


def test_the_warmup_leaves_the_iterate_alone():
    tensors = tensors_of((1000,))
    tensors.iterates[0].fill_(torch.nan)
    before = bits(tensors)
    run_pass(tensors, COEFFICIENTS["warm-up"], 0.0)
    assert bits(tensors)[1] == before[1]
    assert bool(tensors.weights[0].isfinite().all())


def test_a_zero_coefficient_drops_its_term():
    tensors = tensors_of((100,))
    tensors.gradients[0].fill_(torch.inf)
    tensors.weights[0][3] = torch.inf
    run_pass(tensors, COEFFICIENTS["zero lr"], 0.0, weight_decay=0.0)
    assert bool(tensors.iterates[0].isfinite().all())  # neither 0·∞ of the gradient
    tensors = tensors_of((100,))
    tensors.weights[0][3], tensors.offsets[0][4] = torch.inf, torch.nan
    run_pass(tensors, COEFFICIENTS["iterate"], 0.0, weight_decay=0.0)
    assert bool(tensors.iterates[0].isfinite().all())  # nor 0·∞ of w, nor 0·NaN of δ


def test_a_force_beyond_float32():
    tensors = tensors_of((10,))
    run_pass(tensors, COEFFICIENTS["iterate"], -1e60)
    assert bool(tensors.weights[0].isinf().all())
