"""Chunks give the matrix of the whole batch or an error, in both dtypes and with dropout."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout

from neumann.spectrum import Hessian, Objective
from tests.support.small_networks import CURVATURES, batch, multiply_ones, tiny_mlp

DTYPES = (torch.float32, torch.float64)


@pytest.mark.parametrize("kind", CURVATURES)
@pytest.mark.parametrize("chunk", [1, 7, 23, 100])
def test_chunks_equal_the_whole_batch(kind, chunk):
    model, pair = tiny_mlp(), batch(23, 5)
    whole = kind(model, cross_entropy, batch=pair)
    pieces = kind(model, cross_entropy, batch=pair, chunk=chunk)
    assert torch.allclose(multiply_ones(pieces), multiply_ones(whole), atol=1e-9)
    assert all(piece.examples <= chunk for piece in pieces.pieces)
    assert pieces.about.batches == 1


def test_chunks_are_refused_with_batch_statistics():
    model, pair = tiny_mlp(norm=True), batch(23, 5)
    with pytest.raises(ValueError, match='chunk=8 conflicts with batchnorm="batch"'):
        Hessian(model, cross_entropy, batch=pair, chunk=8)
    Hessian(model, cross_entropy, batch=pair, chunk=23)  # a single chunk is allowed
    whole = Hessian(model, cross_entropy, batch=pair, batchnorm="running")
    pieces = Hessian(model, cross_entropy, batch=pair, batchnorm="running", chunk=8)
    assert torch.allclose(multiply_ones(pieces), multiply_ones(whole), atol=1e-12)


def test_chunks_are_refused_if_examples_are_mixed():
    model, pair = tiny_mlp(), batch(23, 5)
    centered = Objective(
        lambda m, b: m(b[0] - b[0].mean(0)), lambda out, b: cross_entropy(out, b[1])
    )
    with pytest.raises(ValueError, match="chunk= changes the loss"):
        Hessian(model, centered, batch=pair, chunk=8) @ torch.ones(57, dtype=torch.float64)

    def total(output, target):
        return cross_entropy(output, target, reduction="sum")

    with pytest.raises(ValueError, match="or the loss is not their mean"):
        Hessian(model, total, batch=pair, chunk=8) @ torch.ones(57, dtype=torch.float64)


class Normalized(nn.Module):
    """A network with optional batch normalization written by hand."""

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drop", [0.0, 0.1])
@pytest.mark.parametrize("kind", CURVATURES)
def test_layers_that_mix_examples_are_detected(kind, drop, dtype):
    for examples, chunk in ((2000, 1000), (2000, 250), (64, 32), (64, 4)):
        operator = kind(
            Normalized(drop).to(dtype), cross_entropy, batch=data(examples, dtype), chunk=chunk
        )
        with pytest.raises(ValueError, match=r"chunk= changes the (loss|gradient)"):
            multiply_ones(operator)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixing_that_only_the_gradient_shows(dtype):
    def spread(output, target):
        away = output - output.detach()  # zeros, with a gradient
        return cross_entropy(output, target) + (away * output.detach().mean(0)).mean()

    model = Normalized(mixes=False).to(dtype)
    with pytest.raises(ValueError, match="chunk= changes the gradient"):
        multiply_ones(Hessian(model, spread, batch=data(64, dtype), chunk=32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drop", [0.0, 0.1])
def test_sums_are_refused(drop, dtype):
    model = Normalized(drop, mixes=False).to(dtype)
    total = nn.CrossEntropyLoss(reduction="sum")
    with pytest.raises(ValueError, match="or the loss is not their mean"):
        multiply_ones(Hessian(model, total, batch=data(64, dtype), chunk=32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_means_over_something_else_are_refused(dtype):
    """One target is ignored, and it is not in the first chunks."""
    x, y = data(64, dtype)
    y[50] = -100
    with pytest.raises(ValueError, match="or the loss is not their mean"):
        multiply_ones(
            Hessian(Normalized(mixes=False).to(dtype), cross_entropy, batch=(x, y), chunk=8)
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drop", [0.0, 0.1])
def test_dropout_and_rounding_are_accepted(drop, dtype):
    model, pair = Normalized(drop, mixes=False).to(dtype), data(64, dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(301):
        if step % 100 == 0:  # towards a gradient that is a small difference of larger numbers
            for kind in CURVATURES:
                operator = kind(model, cross_entropy, batch=pair, chunk=(1, 7, 32)[step % 3])
                assert torch.isfinite(multiply_ones(operator)).all()
        optimizer.zero_grad()
        cross_entropy(model(pair[0]), pair[1]).backward()
        optimizer.step()
    assert model.drop.training


def test_a_batch_of_one_chunk_does_not_hide_the_next():
    x, y = data(80, torch.float64)
    parts = [(x[:16], y[:16]), (x[16:], y[16:])]
    with pytest.raises(ValueError, match="chunk= changes"):
        multiply_ones(Hessian(Normalized().double(), cross_entropy, loader=parts, chunk=16))


class Dropping(Normalized):
    def forward(self, x):
        return self.last(dropout(self.first(x).tanh(), 0.5, self.training))


def test_other_random_numbers_are_refused():
    model, pair = Dropping().double(), data(64, torch.float64)
    with pytest.raises(ValueError, match="draws random numbers outside of dropout layers"):
        multiply_ones(Hessian(model, cross_entropy, batch=pair, chunk=32))
    model.eval()
    whole = multiply_ones(Hessian(model, cross_entropy, batch=pair))
    chunked = multiply_ones(Hessian(model, cross_entropy, batch=pair, chunk=32))
    assert torch.allclose(chunked, whole, atol=1e-12)


def test_the_check_restores_the_weights_and_runs_once():
    model, pair = Normalized(mixes=False), data(64, torch.float32)
    before = [p.clone() for p in model.parameters()]
    operator = Hessian(model, cross_entropy, batch=pair, chunk=32)
    multiply_ones(operator)
    assert all(map(torch.equal, before, model.parameters()))
    assert operator._unchecked_batch is None
