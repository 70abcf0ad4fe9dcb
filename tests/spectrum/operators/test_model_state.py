"""A measurement leaves the model, its gradients and all random generators as they were."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from neumann.spectrum import (
    GaussNewton,
    Hessian,
    NonFiniteProduct,
    Objective,
    density,
    extremes,
)
from tests.support.small_networks import CURVATURES, batch, dense_hessian, mlp


class Counting(nn.Module):
    """A layer with two buffers: it writes one in place and replaces the other."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("latest", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.latest = x.detach().mean()
        return x


def network():
    torch.manual_seed(0)
    model = nn.Sequential(
        *mlp(5, 6, 3, norm=True)[:3], Counting(), nn.Dropout(0.3), nn.Linear(6, 3)
    )
    model[0].eval()  # a mixture of modes
    model[1].momentum = None
    model[5].bias.requires_grad_(False)
    return model.double()


def snapshot(model):
    """Return everything that must not change, in comparable form."""
    return {
        "modes": [module.training for module in model.modules()],
        "tracking": model[1].track_running_stats,
        "tensors": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "identities": [id(t) for t in [*model.parameters(), *model.buffers()]],
        "flags": [p.requires_grad for p in model.parameters()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),  # noqa: NPY002
    }


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("kind", CURVATURES)
@pytest.mark.parametrize("batchnorm", ["batch", "running"])
def test_nothing_changes(kind, batchnorm):
    model, pair = network(), batch(12, 5)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = snapshot(model)
    operator = kind(model, cross_entropy, batch=pair, batchnorm=batchnorm)
    extremes(operator, max_products=4)
    density(operator, probes=2, steps=2)
    assert same(snapshot(model), before)


@pytest.mark.parametrize("kind", CURVATURES)
def test_nothing_changes_after_an_exception(kind):
    model, pair = network(), batch(12, 5)
    calls = []

    def fails(output, target):
        calls.append(1)
        random.random()
        np.random.rand()  # noqa: NPY002
        if len(calls) == 3:
            raise KeyboardInterrupt
        return cross_entropy(output, target)

    before = snapshot(model)
    # Several batches: the graph is not kept, so the loss is evaluated again.
    operator = kind(model, fails, loader=[pair, pair])
    with pytest.raises(KeyboardInterrupt):
        extremes(operator)
    assert same(snapshot(model), before)
    calls.append(1)
    assert extremes(operator, max_products=2).products == 2  # and it can be used again


@pytest.mark.parametrize("kind", CURVATURES)
def test_nothing_changes_after_a_product_that_is_not_finite(kind):
    model, pair = network(), batch(12, 5)
    before = snapshot(model)
    objective = Objective(lambda m, b: m(b[0]), lambda out, b: (out.square() * float("inf")).mean())
    with pytest.raises(NonFiniteProduct):
        extremes(kind(model, objective, batch=pair))
    assert same(snapshot(model), before)


@pytest.mark.slow
def test_batchnorm_modes_are_different_matrices():
    torch.manual_seed(0)
    model, pair = mlp(5, 6, 3, norm=True).double(), batch(12, 5)
    with torch.no_grad():
        model(torch.randn(50, 5, dtype=torch.float64))  # for other running statistics
    by_batch = Hessian(model, cross_entropy, batch=pair)
    running = Hessian(model, cross_entropy, batch=pair, batchnorm="running")
    assert torch.allclose(by_batch.dense(), dense_hessian(model, pair), atol=1e-12)
    assert not torch.allclose(by_batch.dense(), running.dense(), atol=1e-3)
    assert (by_batch.about.batchnorm, running.about.batchnorm) == ("batch", "running")
    # Only the batchnorm argument matters, not the mode of the model.
    whole = running.dense()
    model.eval()
    assert torch.equal(by_batch.dense(), Hessian(model, cross_entropy, batch=pair).dense())
    assert torch.allclose(running.dense(), whole)
    plain = mlp(5, 6, 3).double()
    assert Hessian(plain, cross_entropy, batch=pair).about.batchnorm is None


def test_batchnorm_is_checked():
    model, pair = mlp(5, 6, 3, norm=True).double(), batch(12, 5)
    with pytest.raises(ValueError, match='batchnorm must be "batch" or "running"'):
        Hessian(model, cross_entropy, batch=pair, batchnorm="eval")
    model[1] = nn.BatchNorm1d(6, track_running_stats=False).double()
    with pytest.raises(ValueError, match="needs running statistics, and 1 keeps none"):
        Hessian(model, cross_entropy, batch=pair, batchnorm="running")


@pytest.mark.parametrize("kind", CURVATURES)
def test_dropout_gives_one_fixed_matrix(kind):
    model, pair = network(), batch(12, 5)
    operator = kind(model, cross_entropy, batch=pair)
    v = torch.ones(operator.size, dtype=torch.float64)
    first = operator @ v
    torch.manual_seed(99)
    assert torch.equal(operator @ v, first)  # whatever happens to the generators outside
    assert operator.about.randomness == "dropout fixed by seed 0"
    assert not torch.allclose(kind(model, cross_entropy, batch=pair, seed=1) @ v, first)
    assert extremes(operator).noise < 1e-6
    model.eval()
    off = kind(model, cross_entropy, batch=pair)
    assert off.about.randomness is None
    assert not torch.allclose(off @ v, first)


@pytest.mark.slow
def test_every_method_uses_the_same_dropout():
    model, pair = network(), batch(12, 5)
    methods = ("retained", "double-backward", "forward-over-reverse")
    whole = [Hessian(model, cross_entropy, batch=pair, method=m).dense() for m in methods]
    assert torch.allclose(whole[0], whole[1])
    assert torch.allclose(whole[0], whole[2])
    for layer in (nn.GRU(3, 3, 2, dropout=0.5), nn.MultiheadAttention(4, 2, dropout=0.1)):
        objective = Objective(lambda m, b: b.sum(), lambda out, b: out)
        operator = Hessian(layer, objective, batch=torch.ones(2, 3))
        assert operator.about.randomness == "dropout fixed by seed 0"


@pytest.mark.parametrize("kind", CURVATURES)
def test_hooks_on_parameters_are_ignored(kind):
    torch.manual_seed(0)
    model, pair = mlp(5, 6, 3).double(), batch(12, 5)
    v = torch.ones(57, dtype=torch.float64)
    plain = kind(model, cross_entropy, batch=pair) @ v
    handles = [p.register_hook(lambda g: 0.1 * g) for p in model.parameters()]
    assert torch.equal(kind(model, cross_entropy, batch=pair) @ v, plain)
    gradients = torch.autograd.grad(cross_entropy(model(pair[0]), pair[1]), model[0].weight)
    for handle in handles:
        handle.remove()
    free = torch.autograd.grad(cross_entropy(model(pair[0]), pair[1]), model[0].weight)
    assert torch.allclose(gradients[0], 0.1 * free[0])  # the hooks were restored and can be removed


class Dropping(nn.Module):
    """Dropout written by hand, with one of several generators."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.way = nn.Linear(5, 6), nn.Linear(6, 3), way

    def forward(self, x):
        h = self.first(x).tanh()
        if self.way == "functional":
            h = nn.functional.dropout(h, 0.5, self.training)
        elif self.way == "torch":
            h = h * (torch.rand_like(h) > 0.5)
        elif self.way == "python":
            h = h * (random.random() > 0.5)
        elif self.way == "numpy":
            h = h * torch.from_numpy(np.random.rand(*h.shape) > 0.5)  # noqa: NPY002
        return self.last(h)


@pytest.mark.parametrize("kind", CURVATURES)
@pytest.mark.parametrize("way", ["functional", "torch", "python", "numpy"])
def test_random_numbers_from_any_generator_are_detected(kind, way):
    model, pair = Dropping(way).double(), batch(12, 5)
    operator = kind(model, cross_entropy, loader=[pair, pair])
    found = extremes(operator)
    assert found.about.randomness == "random numbers fixed by seed 0"
    assert found.noise < 1e-6
    if way == "functional":
        model.eval()
        assert extremes(operator, max_products=1).about.randomness is None


def test_deterministic_models_report_no_randomness():
    torch.manual_seed(0)
    model, pair = mlp(5, 6, 3).double(), batch(12, 5)
    for kind in CURVATURES:
        assert extremes(kind(model, cross_entropy, batch=pair)).about.randomness is None


@pytest.mark.slow
def test_buffers_are_reset_before_each_pass():
    """Spectral normalization updates its vectors in every training pass."""
    torch.manual_seed(0)
    model, (x, y) = mlp(5, 6, 3).double(), batch(12, 5)
    model[0] = nn.utils.parametrizations.spectral_norm(model[0], n_power_iterations=1)
    with torch.no_grad():  # far from where the iteration ends
        for buffer in model.buffers():
            buffer.copy_(torch.ones_like(buffer) / len(buffer) ** 0.5)
    whole = Hessian(model, cross_entropy, batch=(x, y)).dense()
    halves = [(x[:6], y[:6]), (x[6:], y[6:])]
    operator = Hessian(model, cross_entropy, loader=halves)
    assert torch.allclose(operator.dense(), whole, atol=1e-12)
    chunked = Hessian(model, cross_entropy, batch=(x, y), chunk=6)
    assert torch.allclose(chunked.dense(), whole, atol=1e-12)
    gauss_newton = GaussNewton(model, cross_entropy, loader=halves)
    other = GaussNewton(model, cross_entropy, batch=(x, y))
    assert torch.allclose(gauss_newton.dense(), other.dense(), atol=1e-12)
