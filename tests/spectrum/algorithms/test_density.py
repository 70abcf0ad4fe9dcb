"""Densities, traces and norms of matrices with known eigenvalues."""

import math

import pytest
import torch
from scipy import stats
from torch.nn.functional import cross_entropy

from neumann.spectrum import Hessian, density
from neumann.spectrum.algorithms.density import student_t_probability, student_t_quantile
from tests.support.known_spectra import diagonal_operator
from tests.support.small_networks import batch, mlp


def spectrum(size=2000):
    generator = torch.Generator().manual_seed(0)
    bulk = torch.randn(size, generator=generator, dtype=torch.float64)
    return torch.where(torch.arange(size) % 4 == 0, bulk + 6, bulk)  # a quarter is shifted


def smoothed(points, values, width):
    away = (points[:, None] - values) / width
    return torch.exp(-away.square() / 2).mean(1) / (width * math.sqrt(2 * math.pi))


@pytest.mark.slow
def test_density_trace_and_norm():
    values = spectrum()
    found = density(diagonal_operator(values), probes=10, steps=60, confidence=0.99)
    step = float(found.points[1] - found.points[0])
    assert float(found.density.sum()) * step == pytest.approx(1, abs=1e-3)
    exact = smoothed(found.points, values, found.width)
    inside = (found.lower <= exact + 1e-3) & (exact <= found.upper + 1e-3)
    assert inside.double().mean() > 0.95
    upper_part = float(found.density[found.points > 3].sum()) * step
    assert upper_part == pytest.approx(0.25, abs=0.03)
    assert found.trace.lower <= float(values.sum()) <= found.trace.upper
    assert found.frobenius.lower <= float(values.norm()) <= found.frobenius.upper
    assert found.frobenius.standard_error < 0.05 * found.frobenius.value
    assert found.products == 600
    assert len(found.nodes) == found.probes == 10
    assert all(float(w.sum()) == pytest.approx(1) for w in found.weights)
    assert (found.lower >= 0).all()


@pytest.mark.slow
def test_more_probes_narrow_the_band():
    values = spectrum(500)
    few, many = (density(diagonal_operator(values), probes=p, steps=20) for p in (4, 40))
    assert many.trace.standard_error < few.trace.standard_error
    assert (many.upper - many.lower).mean() < (few.upper - few.lower).mean()


def test_intervals_hold_as_often_as_stated():
    values = spectrum(200)
    held = 0
    for trial in range(60):
        found = density(
            diagonal_operator(values), probes=4, steps=2, seed=100 * trial, confidence=0.9
        )
        held += found.trace.lower <= float(values.sum()) <= found.trace.upper
    assert 0.75 <= held / 60 <= 1


@pytest.mark.slow
def test_intervals_with_outliers_hold_as_often_as_stated():
    """With 3 outliers and 8 probes, the probes' spread alone would give 88 % and 84 %."""
    values, trials = 0.01 * spectrum(200) / 6, 100
    values[:3] = torch.tensor([1.0, 0.7, -0.5])
    trace, frobenius = float(values.sum()), float(values.norm())
    held = [0, 0]
    for trial in range(trials):
        found = density(diagonal_operator(values), probes=8, steps=3, seed=100 * trial, points=2)
        held[0] += found.trace.lower <= trace <= found.trace.upper
        held[1] += found.frobenius.lower <= frobenius <= found.frobenius.upper
    assert min(held) >= 0.95 * trials
    assert max(held) < trials  # the intervals are not too wide either


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_trace_and_norm_need_only_one_step(steps):
    values = spectrum(300)
    short = density(diagonal_operator(values), probes=12, steps=steps)
    long = density(diagonal_operator(values), probes=12, steps=20)
    assert short.frobenius.value == pytest.approx(long.frobenius.value, rel=1e-9)
    assert short.trace.value == pytest.approx(long.trace.value, rel=1e-9)
    assert short.frobenius.lower <= float(values.norm()) <= short.frobenius.upper


def test_a_few_distinct_eigenvalues_are_exact():
    values = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64).repeat(50)
    seen = []
    found = density(
        diagonal_operator(values), probes=3, steps=30, width=0.05, observe=lambda *w: seen.append(w)
    )
    assert all(len(nodes) == 3 for nodes in found.nodes)
    assert found.width == 0.05
    assert found.products == 9
    assert [step for step, _, _ in seen] == list(range(1, 10))
    flat = density(diagonal_operator(torch.zeros(10, dtype=torch.float64)), probes=2, steps=4)
    assert flat.trace.value == flat.frobenius.value == flat.frobenius.standard_error == 0
    assert flat.width > 0


@pytest.mark.slow
def test_density_of_a_network_says_what_was_measured():
    torch.manual_seed(0)
    model = mlp(5, 6, 3, norm=True).double()
    operator = Hessian(model, cross_entropy, batch=batch(12, 5), weight_decay=0.1)
    found = density(operator, probes=30, steps=30)
    exact = operator.dense()
    assert found.trace.value == pytest.approx(
        float(exact.trace()), abs=5 * found.trace.standard_error
    )
    assert found.about == operator.about
    assert found.about.weight_decay == 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probes": 1}, "probes must be an integer of at least 2"),
        ({"steps": 0}, "steps must be"),
        ({"points": 1}, "points must be"),
        ({"confidence": 1.0}, "confidence must be"),
        ({"width": 0.0}, "width must be"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        density(diagonal_operator(torch.ones(5, dtype=torch.float64)), **options)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 30, 101])
def test_student_t_matches_scipy(freedom):
    for probability in (0.5, 0.75, 0.95, 0.975, 0.9995):
        expected = stats.t.ppf(probability, freedom)
        assert student_t_quantile(probability, freedom) == pytest.approx(
            expected, rel=1e-9, abs=1e-9
        )
    assert student_t_probability(2.0, freedom) == pytest.approx(
        2 * stats.t.cdf(2.0, freedom) - 1, rel=1e-12
    )
    with pytest.raises(ValueError, match="probability must be"):
        student_t_quantile(1.0, freedom)
