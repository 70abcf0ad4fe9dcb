"""Chunks are the whole batch or an error: in float32 and float64, with dropout and without."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout

from neumann.spectrum import Differences, GaussNewton, Hessian

KINDS = (Hessian, GaussNewton, Differences)
DTYPES = (torch.float32, torch.float64)


class Normalised(nn.Module):
    """Batch normalisation by hand, in training mode or always."""

    def __init__(self, drop=0.0, mixes=True):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(10, 16), nn.Linear(16, 3)
        self.drop, self.mixes = nn.Dropout(drop), mixes

    def forward(self, x):
        h = self.first(x)
        if self.mixes:
            h = (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()
        return self.last(self.drop(h.relu()))


def data(examples, dtype):
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(examples, 10, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(3, (examples,), generator=generator)


def multiplied(operator):
    return operator @ torch.ones(operator.size, dtype=operator.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drop", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_mix_examples_are_found(kind, drop, dtype):
    for examples, chunk in ((2000, 1000), (2000, 250), (64, 32), (64, 4)):
        operator = kind(
            Normalised(drop).to(dtype), cross_entropy, batch=data(examples, dtype), chunk=chunk
        )
        with pytest.raises(ValueError, match=r"chunk= changes the (loss|gradient)"):
            multiplied(operator)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mixture_that_the_loss_does_not_show(dtype):
    def spread(output, target):
        away = output - output.detach()  # zeros, with a gradient
        return cross_entropy(output, target) + (away * output.detach().mean(0)).mean()

    model = Normalised(mixes=False).to(dtype)
    with pytest.raises(ValueError, match="chunk= changes the gradient"):
        multiplied(Hessian(model, spread, batch=data(64, dtype), chunk=32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drop", [0.0, 0.1])
def test_sums_are_refused(drop, dtype):
    model = Normalised(drop, mixes=False).to(dtype)
    total = nn.CrossEntropyLoss(reduction="sum")
    with pytest.raises(ValueError, match="or the loss is not their mean"):
        multiplied(Hessian(model, total, batch=data(64, dtype), chunk=32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_means_over_something_else_are_refused(dtype):
    """Few targets are left out, and none of them in the first chunks."""
    x, y = data(64, dtype)
    y[50] = -100
    with pytest.raises(ValueError, match="or the loss is not their mean"):
        multiplied(Hessian(Normalised(mixes=False).to(dtype), cross_entropy, batch=(x, y), chunk=8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drop", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_and_rounding_are_no_mixture(kind, drop, dtype):
    model, pair = Normalised(drop, mixes=False).to(dtype), data(64, dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(301):
        operator = kind(model, cross_entropy, batch=pair, chunk=(1, 7, 32)[step % 3])
        if step % 100 == 0:  # to where the gradient is a small difference of larger numbers
            assert torch.isfinite(multiplied(operator)).all()
        optimizer.zero_grad()
        cross_entropy(model(pair[0]), pair[1]).backward()
        optimizer.step()
    assert model.drop.training


def test_a_batch_that_is_not_cut_does_not_hide_one_that_is():
    x, y = data(80, torch.float64)
    parts = [(x[:16], y[:16]), (x[16:], y[16:])]
    with pytest.raises(ValueError, match="chunk= changes"):
        multiplied(Hessian(Normalised().double(), cross_entropy, loader=parts, chunk=16))


class Dropping(Normalised):
    def forward(self, x):
        return self.last(dropout(self.first(x).tanh(), 0.5, self.training))


def test_random_numbers_of_other_kinds_cannot_be_checked():
    model, pair = Dropping().double(), data(64, torch.float64)
    with pytest.raises(ValueError, match="draws random numbers outside of dropout layers"):
        multiplied(Hessian(model, cross_entropy, batch=pair, chunk=32))
    model.eval()
    whole = multiplied(Hessian(model, cross_entropy, batch=pair))
    chunked = multiplied(Hessian(model, cross_entropy, batch=pair, chunk=32))
    assert torch.allclose(chunked, whole, atol=1e-12)


def test_weights_are_as_before_and_the_check_is_made_once():
    model, pair = Normalised(mixes=False), data(64, torch.float32)
    before = [p.clone() for p in model.parameters()]
    operator = Hessian(model, cross_entropy, batch=pair, chunk=32)
    multiplied(operator)
    assert all(map(torch.equal, before, model.parameters()))
    assert operator._cut is None
