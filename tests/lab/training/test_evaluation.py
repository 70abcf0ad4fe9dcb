"""Evaluation: every example counts once, and the model is unchanged afterwards."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from neumann.lab.data import Plan, load
from neumann.lab.training.batchnorm_layers import has_batchnorm, keep_statistics
from neumann.lab.training.evaluation import evaluate
from neumann.lab.training.processes import Process


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


@pytest.mark.parametrize("batch_size", [1, 7, 360, 10_000])
def test_the_score_does_not_depend_on_the_batches(digits, batch_size):
    model = network().eval()
    inputs, labels = next(iter(whole(digits)))
    with torch.no_grad():
        logits = model(inputs)
    score = evaluate(model, digits.test, batch_size, Process(), contextlib.nullcontext())
    assert score.examples == 360
    assert score.loss == pytest.approx(float(cross_entropy(logits, labels)), rel=1e-5)
    assert score.accuracy == pytest.approx(100 * float((logits.argmax(1) == labels).float().mean()))


def whole(dataset):
    for pieces in dataset.test.batches(Plan(360, train=False)):
        yield pieces[0]


def test_evaluation_restores_the_mode_and_keeps_statistics(digits):
    model = network()
    before = model[1].running_mean.clone()
    evaluate(model, digits.test, 64, Process(), contextlib.nullcontext())
    assert model.training
    assert torch.equal(model[1].running_mean, before)


def test_keep_statistics_restores_them_even_after_an_exception():
    model = network()
    before = {name: b.clone() for name, b in model.named_buffers()}
    with keep_statistics(model):
        model(torch.randn(16, 64))
        assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    with pytest.raises(RuntimeError), keep_statistics(model):
        model(torch.randn(16, 63))
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())


def test_has_batchnorm():
    assert has_batchnorm(network())
    assert not has_batchnorm(nn.Linear(2, 2))
    assert not has_batchnorm(nn.BatchNorm1d(2, track_running_stats=False))
