"""Loaders: every example has the same weight, and every product sees the same data."""

from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from neumann.spectrum import Hessian, Objective, extremes
from tests.support.small_networks import CURVATURES, batch, multiply_ones, tiny_mlp


@pytest.mark.parametrize("kind", CURVATURES)
def test_a_ragged_loader_equals_the_whole_batch(kind):
    model, (x, y) = tiny_mlp(), batch(23, 5)
    whole = kind(model, cross_entropy, batch=(x, y))
    loader = DataLoader(TensorDataset(x, y), batch_size=10)
    pieces = kind(model, cross_entropy, loader=loader)
    assert torch.allclose(multiply_ones(pieces), multiply_ones(whole), atol=1e-9)
    assert (pieces.about.examples, pieces.about.batches) == (23, 3)
    assert (whole.about.examples, whole.about.batches) == (23, 1)
    two = kind(model, cross_entropy, loader=loader, batches=2)
    first = kind(model, cross_entropy, batch=(x[:20], y[:20]))
    assert torch.allclose(multiply_ones(two), multiply_ones(first), atol=1e-9)


def test_a_shuffled_loader_gives_one_matrix():
    model, (x, y) = tiny_mlp(norm=True), batch(24, 5)
    state = torch.get_rng_state()
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    operator = Hessian(model, cross_entropy, loader=loader)
    assert torch.equal(multiply_ones(operator), multiply_ones(operator))
    assert torch.equal(torch.get_rng_state(), state)
    assert extremes(operator).noise < 1e-10


def test_batches_of_any_form():
    model, (x, y) = tiny_mlp(), batch(11, 5)
    expected = Hessian(model, cross_entropy, batch=(x, y))
    v = torch.ones(expected.size, dtype=torch.float64)
    objective = Objective(lambda m, b: m(b["x"]), lambda out, b: cross_entropy(out, b["y"]))
    named = {"x": x, "y": y, "note": "kept"}
    by_name = Hessian(model, objective, batch=named, chunk=4)
    assert torch.allclose(by_name @ v, expected @ v, atol=1e-12)
    pair = namedtuple("pair", "x y")(x, y)
    for form in ([x, y], pair):
        assert torch.allclose(Hessian(model, cross_entropy, batch=form) @ v, expected @ v)
    own = Objective(lambda m, b: m(b()[0]), lambda out, b: cross_entropy(out, b()[1]))
    counted = Hessian(model, own, batch=lambda: (x, y), count=lambda b: len(b()[0]))
    assert torch.allclose(counted @ v, expected @ v)
    assert counted.about.examples == 11


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "pass either batch= or loader=, got neither"),
        ({"batch": batch(3, 5), "loader": []}, ValueError, "got both"),
        ({"loader": []}, ValueError, "loader yielded no batch"),
        ({"loader": [batch(3, 5)], "batches": 0}, ValueError, "batches must be at least 1"),
        ({"batch": batch(3, 5), "batches": 1}, ValueError, "batches must be at least 1"),
        ({"batch": batch(3, 5), "chunk": 0}, ValueError, "chunk must be"),
        ({"batch": batch(0, 5)}, ValueError, "the examples of batch 0 must be at least 1, got 0"),
        ({"batch": "text"}, TypeError, "cannot count the examples of a str"),
        ({"batch": (torch.ones(4, 5), torch.ones(2)), "chunk": 2}, ValueError, "all have the 4"),
    ],
)
def test_data_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        Hessian(tiny_mlp(), cross_entropy, **options)


def test_a_leading_scalar_does_not_count_as_examples():
    model = nn.Linear(5, 1).double()
    objective = Objective(lambda m, b: b[0] * m(b[1]), lambda out, b: out.square().mean())
    x = torch.ones(6, 5, dtype=torch.float64)
    operator = Hessian(model, objective, batch=(torch.tensor(2.0), x))
    assert operator.about.examples == 6


@pytest.mark.parametrize("kind", CURVATURES)
def test_a_loader_may_reuse_its_tensors(kind):
    model, (x, y) = tiny_mlp(), batch(16, 5)

    def filling():
        inputs, targets = torch.empty_like(x[:8]), torch.empty_like(y[:8])
        for start in (0, 8):
            inputs.copy_(x[start : start + 8])
            targets.copy_(y[start : start + 8])
            yield inputs, targets

    whole = kind(model, cross_entropy, batch=(x, y))
    pieces = kind(model, cross_entropy, loader=filling())
    assert torch.allclose(multiply_ones(pieces), multiply_ones(whole), atol=1e-9)


def test_batches_of_a_list_are_not_copied():
    pair = batch(6, 5)
    operator = Hessian(tiny_mlp(), cross_entropy, loader=[pair, pair])
    assert operator.pieces[0].data is pair


def test_a_dataset_is_refused_as_a_loader():
    dataset = TensorDataset(*batch(16, 5))
    with pytest.raises(TypeError, match=r"TensorDataset is a dataset.*DataLoader\(dataset"):
        Hessian(tiny_mlp(), cross_entropy, loader=dataset)
