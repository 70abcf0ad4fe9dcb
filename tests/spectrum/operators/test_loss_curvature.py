"""What all curvature operators share: parameters, weight decay, dtypes and sessions."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from neumann.spectrum import Differences, Hessian, extremes, lanczos
from tests.support.small_networks import CURVATURES, dense_hessian, problem, vectors


@pytest.mark.parametrize("kind", CURVATURES)
def test_weight_decay_adds_a_multiple_of_the_identity(kind):
    model, pair = problem()
    plain, decayed = (kind(model, cross_entropy, batch=pair, weight_decay=d) for d in (0.0, 0.3))
    v = vectors(plain.size, 1)[:, 0]
    assert torch.allclose(decayed @ v, plain @ v + 0.3 * v, atol=1e-8)
    assert (plain.about.weight_decay, decayed.about.weight_decay) == (0.0, 0.3)
    with pytest.raises(ValueError, match="weight_decay must be"):
        kind(model, cross_entropy, batch=pair, weight_decay=-1.0)


@pytest.mark.parametrize("wanted", [["2.*"], "2.*", lambda name: name.startswith("2")])
@pytest.mark.parametrize("kind", [Hessian, Differences])
def test_a_filter_selects_a_block(wanted, kind):
    model, pair = problem(norm=False)
    operator = kind(model, cross_entropy, batch=pair, parameters=wanted)
    assert operator.about.names == ("2.weight", "2.bias")
    exact = dense_hessian(model, pair, ["2.weight", "2.bias"])
    assert torch.allclose(operator.dense(), exact, atol=1e-7)


def test_filters_and_models_without_parameters():
    model, pair = problem()
    with pytest.raises(ValueError, match="matches none of the trainable parameters"):
        Hessian(model, cross_entropy, batch=pair, parameters=["nothing.*"])
    with pytest.raises(ValueError, match=r"parameters: '4\.biass' matches none of the trainable"):
        Hessian(model, cross_entropy, batch=pair, parameters=["*.weight", "4.biass"])
    for nothing in ([], lambda name: False):
        with pytest.raises(ValueError, match="matches none of the trainable parameters"):
            Hessian(model, cross_entropy, batch=pair, parameters=nothing)
    model[0].weight.requires_grad_(False)
    assert "0.weight" not in Hessian(model, cross_entropy, batch=pair).about.names
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameters"):
        Hessian(model, cross_entropy, batch=pair)
    with pytest.raises(ValueError, match="no trainable parameters"):
        Hessian(nn.ReLU(), cross_entropy, batch=pair)


def test_dtypes_are_checked():
    model, pair = problem()
    model[0].float()
    with pytest.raises(ValueError, match="share one dtype"):
        Hessian(model, cross_entropy, batch=pair)
    with pytest.raises(ValueError, match=r"got torch\.bfloat16"):
        Hessian(model.bfloat16(), cross_entropy, batch=pair)


@pytest.mark.parametrize("kind", CURVATURES)
def test_a_loss_that_is_not_scalar(kind):
    model, pair = problem()

    def each(output, target):
        return cross_entropy(output, target, reduction="none")

    operator = kind(model, each, batch=pair)
    with pytest.raises(ValueError, match=r"loss must return a scalar.*\(14,\)"):
        lanczos(operator)
    with pytest.raises(TypeError, match="loss must be an Objective"):
        kind(model, "cross_entropy", batch=pair)
    with pytest.raises(ValueError, match=r"scalar.*got float"):
        kind(model, lambda output, target: 1.0, batch=pair) @ torch.ones(
            operator.size, dtype=torch.float64
        )


@pytest.mark.parametrize("kind", CURVATURES)
def test_sparse_embeddings_are_refused_if_selected(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Tanh(), nn.Linear(4, 3)).double()
    pair = torch.randint(5, (7,)), torch.randint(3, (7,))
    with pytest.raises(ValueError, match="0 is an embedding with sparse=True"):
        kind(model, cross_entropy, batch=pair)
    head = kind(model, cross_entropy, batch=pair, parameters="2.*").dense()
    model[0].sparse = False
    whole = kind(model, cross_entropy, batch=pair).dense()
    assert torch.allclose(whole[20:, 20:], head, atol=1e-7)


@pytest.mark.slow
def test_no_graph_or_tensor_leaks():
    model, pair = problem()
    operators = [kind(model, cross_entropy, batch=pair) for kind in CURVATURES]

    def alive():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    for operator in operators:
        extremes(operator, max_products=3)
    before = alive()
    for seed in range(20):
        for operator in operators:
            extremes(operator, max_products=1, seed=seed)
    assert alive() <= before
    assert all(p.grad is None for p in model.parameters())


def test_a_session_keeps_the_graph_and_the_next_uses_new_weights():
    model, pair = problem()
    operator = Hessian(model, cross_entropy, batch=pair)
    v = vectors(operator.size, 1)[:, 0]
    with operator.session():
        first, again = operator @ v, operator @ v
        assert operator._graphs
    assert not operator._graphs
    assert torch.equal(first, again)
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert not torch.allclose(operator @ v, first)
    assert torch.allclose(operator @ v, dense_hessian(model, pair) @ v, atol=1e-12)


def test_changing_weights_inside_a_session_is_an_error():
    model, pair = problem()
    operator = Hessian(model, cross_entropy, batch=pair)
    v = vectors(operator.size, 1)[:, 0]
    with operator.session():
        operator @ v
        with torch.no_grad():
            model[0].weight.mul_(2)
            model[3].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            operator @ v
