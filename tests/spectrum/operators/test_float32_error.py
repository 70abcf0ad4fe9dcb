"""Features far from 0 in float32: the error includes what a float64 copy shows, or a warning."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from neumann.spectrum import Differences, GaussNewton, Hessian, Preconditioned, extremes
from neumann.spectrum.operators import float32_error
from tests.support.small_networks import as_type, batch, dense_hessian, problem
from tests.support.spectra import ends_of, random_network, shift_features


def shifted(seed, ratio, dtype=torch.float32, examples=4):
    model, pair = random_network(seed, examples=examples, hidden=8)
    shift_features(model, pair, ratio)
    return model.to(dtype), as_type(pair, dtype)


@pytest.mark.parametrize("ratio", [91, 313])
def test_the_error_includes_digits_lost_in_batchnorm(ratio):
    """At 313 standard deviations, 23 of 40 seeds were outside of a converged error."""
    for seed in range(6):
        model, pair = shifted(seed, ratio)
        truth = torch.linalg.eigvalsh(dense_hessian(model, pair))
        found = extremes(Hessian(model, cross_entropy, batch=pair), seed=seed)
        for end in ends_of(found, truth, f"seed {seed}"):
            assert end.converged
            assert not end.outside, end


def test_the_error_is_four_times_the_difference_or_less():
    model, pair = shifted(0, 200)
    operator = Hessian(model, cross_entropy, batch=pair)
    truth = dense_hessian(model, pair)
    difference = float(torch.linalg.matrix_norm(operator.dense().double() - truth, 2))
    assert difference < operator.product_error() < 5 * difference
    ones = torch.ones(operator.size)
    assert Preconditioned(operator, 4 * ones).product_error() == 4 * operator.product_error()
    assert GaussNewton(model, cross_entropy, batch=pair).product_error() > 0
    assert Differences(model, cross_entropy, batch=pair).product_error() > operator.product_error()


def test_the_model_is_left_alone():
    model, pair = shifted(0, 200)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    extremes(Hessian(model, cross_entropy, batch=pair))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.dtype == torch.float32 and p.grad is None for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clean_problems_are_not_compared(dtype, monkeypatch):
    monkeypatch.setattr(Hessian, "_copy_in_float64", lambda self: pytest.fail("copied"))
    model, pair = problem(dtype=dtype)
    assert Hessian(model, cross_entropy, batch=pair).product_error() == 0
    model, pair = shifted(0, 200, torch.float64)
    assert Hessian(model, cross_entropy, batch=pair).product_error() == 0


@pytest.mark.parametrize("why", ["random numbers", "fails"])
def test_a_warning_names_the_layer_where_float64_does_not_work(why):
    model, pair = shifted(0, 200)
    loss = cross_entropy
    if why == "random numbers":
        model.append(nn.Dropout(0.1))
    else:
        weight = torch.ones(3)

        def loss(outputs, targets):
            return cross_entropy(outputs, targets, weight=weight)

    operator = Hessian(model, loss, batch=pair)
    with pytest.warns(UserWarning, match=f"^layer '1' normalizes .* is 200 standard .*{why}"):
        assert operator.product_error() == 0
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = extremes(operator)
    assert len(seen) == 1
    assert found.converged


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(4), (6, 4)),
        (nn.BatchNorm2d(4), (6, 4, 3, 3)),
        (nn.LayerNorm(4), (6, 4)),
        (nn.LayerNorm([4, 3, 3]), (6, 4, 3, 3)),
        (nn.GroupNorm(2, 4), (6, 4, 3, 3)),
        (nn.InstanceNorm2d(4), (6, 4, 3, 3)),
    ],
)
def test_means_of_every_normalization(layer, shape):
    features = batch(shape[0], *shape[1:])[0].float()
    model = nn.Sequential(layer)
    with float32_error.record_means(model) as small:
        model(features)
    with float32_error.record_means(model) as large:
        model(features + 100)
    assert float(small["0"]) < float32_error.LARGE_RATIO < 50 < float(large["0"])
    with float32_error.record_means(model) as constant:
        model(torch.zeros(shape))
    assert float(constant["0"]) == 0
