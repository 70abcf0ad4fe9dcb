"""Loaders and chunks: every example counts the same, and every product sees the same data."""

from collections import namedtuple

import pytest
import torch
from small_networks import batch, mlp
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from neumann.spectrum import Differences, GaussNewton, Hessian, Objective, extremes

KINDS = (Hessian, GaussNewton, Differences)


def network(norm=False):
    torch.manual_seed(0)
    return mlp(5, 6, 3, norm=norm).double()


def ones(operator):
    return torch.ones(operator.size, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_a_ragged_loader_is_the_whole_batch(kind):
    model, (x, y) = network(), batch(23, 5)
    whole = kind(model, cross_entropy, batch=(x, y))
    loader = DataLoader(TensorDataset(x, y), batch_size=10)
    pieces = kind(model, cross_entropy, loader=loader)
    assert torch.allclose(pieces @ ones(whole), whole @ ones(whole), atol=1e-9)
    assert (pieces.about.examples, pieces.about.batches) == (23, 3)
    assert (whole.about.examples, whole.about.batches) == (23, 1)
    two = kind(model, cross_entropy, loader=loader, batches=2)
    first = kind(model, cross_entropy, batch=(x[:20], y[:20]))
    assert torch.allclose(two @ ones(two), first @ ones(two), atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 23, 100])
def test_chunks_are_the_whole_batch(kind, chunk):
    model, pair = network(), batch(23, 5)
    whole = kind(model, cross_entropy, batch=pair)
    pieces = kind(model, cross_entropy, batch=pair, chunk=chunk)
    assert torch.allclose(pieces @ ones(whole), whole @ ones(whole), atol=1e-9)
    assert all(piece.examples <= chunk for piece in pieces.pieces)
    assert pieces.about.batches == 1


def test_a_shuffled_loader_is_one_matrix():
    model, (x, y) = network(norm=True), batch(24, 5)
    state = torch.get_rng_state()
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    operator = Hessian(model, cross_entropy, loader=loader)
    assert torch.equal(operator @ ones(operator), operator @ ones(operator))
    assert torch.equal(torch.get_rng_state(), state)
    assert extremes(operator).noise < 1e-10


def test_chunks_are_refused_where_batchnorm_looks_at_the_batch():
    model, pair = network(norm=True), batch(23, 5)
    with pytest.raises(ValueError, match='chunk=8 is wrong with batchnorm="batch"'):
        Hessian(model, cross_entropy, batch=pair, chunk=8)
    Hessian(model, cross_entropy, batch=pair, chunk=23)  # one chunk is no chunk
    whole = Hessian(model, cross_entropy, batch=pair, batchnorm="running")
    pieces = Hessian(model, cross_entropy, batch=pair, batchnorm="running", chunk=8)
    assert torch.allclose(pieces @ ones(whole), whole @ ones(whole), atol=1e-12)


def test_chunks_are_refused_where_examples_are_mixed():
    model, pair = network(), batch(23, 5)
    centred = Objective(
        lambda m, b: m(b[0] - b[0].mean(0)), lambda out, b: cross_entropy(out, b[1])
    )
    with pytest.raises(ValueError, match="chunk= changes the loss"):
        Hessian(model, centred, batch=pair, chunk=8) @ torch.ones(57, dtype=torch.float64)

    def total(output, target):
        return cross_entropy(output, target, reduction="sum")

    with pytest.raises(ValueError, match="or the loss is not their mean"):
        Hessian(model, total, batch=pair, chunk=8) @ torch.ones(57, dtype=torch.float64)


def test_batches_of_any_form():
    model, (x, y) = network(), batch(11, 5)
    expected = Hessian(model, cross_entropy, batch=(x, y))
    v = ones(expected)
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
        ({"loader": []}, ValueError, "loader gave no batch"),
        ({"loader": [batch(3, 5)], "batches": 0}, ValueError, "batches counts"),
        ({"batch": batch(3, 5), "batches": 1}, ValueError, "batches counts"),
        ({"batch": batch(3, 5), "chunk": 0}, ValueError, "chunk must be"),
        ({"batch": batch(0, 5)}, ValueError, "batch 0 has 0 examples"),
        ({"batch": "text"}, TypeError, "cannot count the examples of a str"),
        ({"batch": (torch.ones(4, 5), torch.ones(2)), "chunk": 2}, ValueError, "all have the 4"),
    ],
)
def test_data_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        Hessian(network(), cross_entropy, **options)


def test_a_scalar_in_front_is_not_the_examples():
    model = nn.Linear(5, 1).double()
    objective = Objective(lambda m, b: b[0] * m(b[1]), lambda out, b: out.square().mean())
    x = torch.ones(6, 5, dtype=torch.float64)
    operator = Hessian(model, objective, batch=(torch.tensor(2.0), x))
    assert operator.about.examples == 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_may_fill_the_same_tensors_again(kind):
    model, (x, y) = network(), batch(16, 5)

    def filling():
        inputs, targets = torch.empty_like(x[:8]), torch.empty_like(y[:8])
        for start in (0, 8):
            inputs.copy_(x[start : start + 8])
            targets.copy_(y[start : start + 8])
            yield inputs, targets

    whole = kind(model, cross_entropy, batch=(x, y))
    pieces = kind(model, cross_entropy, loader=filling())
    assert torch.allclose(pieces @ ones(whole), whole @ ones(whole), atol=1e-9)


def test_batches_of_a_list_are_kept_where_they_are():
    pair = batch(6, 5)
    operator = Hessian(network(), cross_entropy, loader=[pair, pair])
    assert operator.pieces[0].data is pair


def test_a_dataset_is_no_loader():
    dataset = TensorDataset(*batch(16, 5))
    with pytest.raises(TypeError, match=r"TensorDataset is a dataset.*DataLoader\(dataset"):
        Hessian(network(), cross_entropy, loader=dataset)
