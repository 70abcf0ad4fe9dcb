"""Products with Hessians and their relatives: against each other, whole matrices and libraries."""

import copy
import gc
import importlib
import json
import warnings

import pytest
import torch
from small_networks import as_type, batch, cnn, dense_hessian, problem, vectors
from torch import nn
from torch.nn.functional import cross_entropy

from neumann.spectrum import (
    Differences,
    GaussNewton,
    Hessian,
    extremes,
    lanczos,
)

METHODS = ("auto", "retained", "double-backward", "forward-over-reverse")


def quiet_import(name):
    """A development dependency, whose own warnings are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            return pytest.skip(f"{name} is not installed")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("norm", [False, True])
def test_every_method_gives_the_whole_hessian(method, norm):
    model, pair = problem(norm)
    operator = Hessian(model, cross_entropy, batch=pair, method=method)
    assert torch.allclose(operator.dense(), dense_hessian(model, pair), atol=1e-12)
    assert operator.about.names == tuple(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("method", METHODS)
def test_convolutions_in_float32(method):
    torch.manual_seed(0)
    model, pair = cnn(4, 3, norm=True), as_type(batch(10, 1, 6, 6), torch.float32)
    operator = Hessian(model, cross_entropy, batch=pair, method=method)
    exact = dense_hessian(model, pair)
    v = vectors(operator.size, dtype=torch.float32)
    assert torch.allclose((operator @ v).double(), exact @ v.double(), atol=1e-4)


def test_under_no_grad_and_with_block_products():
    model, pair = problem()
    operator = Hessian(model, cross_entropy, batch=pair)
    v = vectors(operator.size)
    with torch.no_grad():
        block = operator @ v
    assert torch.equal(block, torch.stack([operator @ c for c in v.T.contiguous()], 1))
    assert not block.requires_grad


@pytest.mark.parametrize(("dtype", "room"), [(torch.float64, 1e-8), (torch.float32, 5e-3)])
def test_differences_come_near_and_say_how_near(dtype, room):
    model, pair = problem(dtype=dtype)
    operator = Differences(model, cross_entropy, batch=pair)
    exact = dense_hessian(model, pair)
    before = copy.deepcopy(model.state_dict())
    v = vectors(operator.size, 1, dtype)[:, 0]
    v /= v.norm()
    error = float(((operator @ v).double() - exact @ v.double()).norm())
    assert error < room
    assert 0 < operator.product_error() < 20 * room
    assert error < 4 * operator.product_error()
    found = extremes(operator, tolerance=0.05)
    top = torch.linalg.eigvalsh(exact)[-1]
    assert abs(found.largest.value - float(top)) <= found.largest.error
    assert found.noise >= operator.product_error()
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert (operator @ torch.zeros_like(v) == 0).all()


def test_against_curvlinops():
    library = quiet_import("curvlinops")
    model, (x, y) = problem(norm=False)
    data = [(x[:6], y[:6]), (x[6:], y[6:])]  # ragged
    parameters = list(model.parameters())
    v = vectors(sum(p.numel() for p in parameters))
    criterion = nn.CrossEntropyLoss()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = library.HessianLinearOperator(model, criterion, parameters, data) @ v
        their_ggn = library.GGNLinearOperator(model, criterion, parameters, data) @ v
    assert torch.allclose(Hessian(model, cross_entropy, loader=data) @ v, theirs, atol=1e-12)
    assert torch.allclose(GaussNewton(model, cross_entropy, loader=data) @ v, their_ggn, atol=1e-12)


def test_against_hessian_eigenthings():
    library = quiet_import("hessian_eigenthings")
    model, pair = problem(norm=False)
    theirs = library.HessianOperator(model, [pair], library.supervised_loss(cross_entropy))
    ours = Hessian(model, cross_entropy, batch=pair)
    v = vectors(ours.size, 1)[:, 0]
    assert torch.allclose(ours @ v, theirs.matvec(v), atol=1e-12)
    found = extremes(ours, tolerance=1e-8)
    top = library.lanczos(theirs, k=1, max_iter=40, which="LA", seed=0).eigenvalues[0]
    assert found.largest.value == pytest.approx(float(top), rel=1e-7)


@pytest.mark.parametrize("kind", [Hessian, GaussNewton, Differences])
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
def test_a_filter_takes_a_block(wanted, kind):
    model, pair = problem(norm=False)
    operator = kind(model, cross_entropy, batch=pair, parameters=wanted)
    assert operator.about.names == ("2.weight", "2.bias")
    exact = dense_hessian(model, pair, ["2.weight", "2.bias"])
    assert torch.allclose(operator.dense(), exact, atol=1e-7)


def test_filters_and_models_without_parameters():
    model, pair = problem()
    with pytest.raises(ValueError, match="passes none of the trainable parameters"):
        Hessian(model, cross_entropy, batch=pair, parameters=["nothing.*"])
    with pytest.raises(ValueError, match=r"parameters: '4\.biass' passes none of the trainable"):
        Hessian(model, cross_entropy, batch=pair, parameters=["*.weight", "4.biass"])
    for nothing in ([], lambda name: False):
        with pytest.raises(ValueError, match="passes none of the trainable parameters"):
            Hessian(model, cross_entropy, batch=pair, parameters=nothing)
    model[0].weight.requires_grad_(False)
    assert "0.weight" not in Hessian(model, cross_entropy, batch=pair).about.names
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameters"):
        Hessian(model, cross_entropy, batch=pair)
    with pytest.raises(ValueError, match="no trainable parameters"):
        Hessian(nn.ReLU(), cross_entropy, batch=pair)


def test_dtypes_are_one_and_wide_enough():
    model, pair = problem()
    model[0].float()
    with pytest.raises(ValueError, match="share one dtype"):
        Hessian(model, cross_entropy, batch=pair)
    with pytest.raises(ValueError, match=r"got torch\.bfloat16"):
        Hessian(model.bfloat16(), cross_entropy, batch=pair)


@pytest.mark.parametrize("kind", [Hessian, GaussNewton, Differences])
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


def test_no_graph_and_no_tensor_is_left_behind():
    model, pair = problem()
    operators = [
        kind(model, cross_entropy, batch=pair) for kind in (Hessian, GaussNewton, Differences)
    ]

    def alive():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    for operator in operators:
        extremes(operator, max_products=3)
    before = alive()
    for seed in range(100):
        for operator in operators:
            extremes(operator, max_products=1, seed=seed)
    assert alive() <= before
    assert all(p.grad is None for p in model.parameters())


def test_a_session_keeps_the_graph_and_a_new_one_sees_new_weights():
    model, pair = problem()
    operator = Hessian(model, cross_entropy, batch=pair)
    v = vectors(operator.size, 1)[:, 0]
    with operator.session():
        first, again = operator @ v, operator @ v
        assert operator._gradients
    assert not operator._gradients
    assert torch.equal(first, again)
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert not torch.allclose(operator @ v, first)
    assert torch.allclose(operator @ v, dense_hessian(model, pair) @ v, atol=1e-12)


def test_weights_that_change_inside_a_session_are_an_error():
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


def test_results_are_records():
    model, pair = problem()
    found = extremes(Hessian(model, cross_entropy, batch=pair, weight_decay=0.01))
    record = json.loads(json.dumps(found.as_dict()))
    assert record["largest"]["value"] == found.largest.value
    assert record["about"]["matrix"] == "hessian"
    assert record["about"]["dtype"] == "torch.float64"
    assert record["about"]["examples"] == 14
    assert record["about"]["weight_decay"] == 0.01
    assert record["products"] == found.products
