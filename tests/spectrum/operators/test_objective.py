"""Losses of all kinds: those that have a Hessian, and those that must be refused."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev
from torch.nn.functional import cross_entropy, huber_loss, l1_loss, mse_loss
from torch.utils.checkpoint import checkpoint

from neumann.spectrum import Differences, GaussNewton, Hessian, NonFiniteProduct, Objective
from tests.support.small_networks import CURVATURES, multiply_ones

NAN, INFINITY = float("nan"), float("inf")


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = (torch.randn(8, n, generator=generator, dtype=torch.float64) for n in (3, 2))
    return model, (x, y)


def flat(model):
    sizes = [p.numel() for p in model.parameters()]

    def named(vector):
        pieces = zip(model.named_parameters(), vector.split(sizes), strict=True)
        return {name: piece.view_as(p) for (name, p), piece in pieces}

    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), named


@pytest.mark.parametrize("loss", [mse_loss, huber_loss])
def test_regression_against_dense_matrices(loss):
    model, (x, y) = problem()
    weights, named = flat(model)
    exact = jacrev(jacrev(lambda w: loss(functional_call(model, named(w), (x,)), y)))(weights)
    for method in ("retained", "double-backward", "forward-over-reverse"):
        if loss is huber_loss and method == "forward-over-reverse":
            with pytest.raises(NotImplementedError, match="huber_loss_backward"):  # torch has none
                multiply_ones(Hessian(model, loss, batch=(x, y), method=method))
            continue
        found = Hessian(model, loss, batch=(x, y), method=method).dense()
        assert torch.allclose(found, exact, atol=1e-12)
    assert torch.allclose(Differences(model, loss, batch=(x, y)).dense(), exact, atol=1e-7)
    outputs = model(x).detach().reshape(-1)
    j = jacrev(lambda w: functional_call(model, named(w), (x,)).reshape(-1))(weights)
    curvature = jacrev(grad(lambda f: loss(f.view_as(y), y)))(outputs)
    found = GaussNewton(model, loss, batch=(x, y)).dense()
    assert torch.allclose(found, j.T @ curvature @ j, atol=1e-12)


@pytest.mark.parametrize("kind", CURVATURES)
@pytest.mark.parametrize("loss", [mse_loss, l1_loss, huber_loss])
@pytest.mark.parametrize("value", [NAN, INFINITY])
def test_targets_that_are_not_finite_are_refused(kind, loss, value):
    model, (x, y) = problem()
    y[3, 1] = value
    for data in ({"batch": (x, y)}, {"loader": [(x[:4], y[:4]), (x[4:], y[4:])]}):
        with pytest.raises(NonFiniteProduct, match="the loss is not finite"):
            multiply_ones(kind(model, loss, **data))


@pytest.mark.parametrize("method", ["retained", "double-backward", "forward-over-reverse"])
def test_every_method_refuses_a_loss_that_is_not_finite(method):
    model, pair = problem()
    operator = Hessian(model, lambda o, t: mse_loss(o, t) + NAN, batch=pair, method=method)
    with pytest.raises(NonFiniteProduct, match="the loss is not finite"):
        multiply_ones(operator)


class Unseen(nn.Module):
    """A model whose outputs have no graph, for one of several reasons."""

    def __init__(self, inner, way):
        super().__init__()
        self.inner, self.way = inner, way

    def forward(self, x):
        if self.way == "detach":
            return self.inner(x).detach()
        if self.way == "no_grad":
            with torch.no_grad():
                return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=True)


@pytest.mark.parametrize("kind", CURVATURES)
@pytest.mark.parametrize("way", ["detach", "no_grad", "checkpoint"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_loss_without_a_graph_is_refused(kind, way):
    model, pair = problem()
    with pytest.raises(ValueError, match="the loss does not depend on any trainable parameter"):
        multiply_ones(kind(Unseen(model, way), mse_loss, batch=pair))
    if kind is Hessian and way != "checkpoint":
        operator = kind(Unseen(model, way), mse_loss, batch=pair, method="forward-over-reverse")
        with pytest.raises(ValueError, match="does not depend on any trainable parameter"):
            multiply_ones(operator)


@pytest.mark.parametrize("kind", CURVATURES)
def test_a_loss_that_detaches_or_skips_the_selected_parameters(kind):
    model, (x, y) = problem()
    with pytest.raises(ValueError, match="does not depend on any trainable parameter"):
        multiply_ones(kind(model, lambda o, t: mse_loss(o.detach(), t), batch=(x, y)))
    last = Objective(lambda m, b: m[2](m[1](m[0](b[0]).detach())), lambda o, b: mse_loss(o, b[1]))
    assert (multiply_ones(kind(model, last, batch=(x, y), parameters="0.*")) == 0).all()
    assert (multiply_ones(kind(model, last, batch=(x, y), parameters="2.*")) != 0).any()


@pytest.mark.parametrize("kind", CURVATURES)
def test_inference_mode_is_refused(kind):
    model, pair = problem()
    operator = kind(model, mse_loss, batch=pair)
    v = torch.ones(operator.size, dtype=torch.float64)
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match="inference_mode"):
            kind(model, mse_loss, batch=pair)
        with pytest.raises(RuntimeError, match="inference_mode"):
            operator @ v
    assert torch.isfinite(operator @ v).all()


class OnceLoss(torch.autograd.Function):
    """A mean square whose derivative cannot be differentiated."""

    @staticmethod
    def forward(context, output, target):
        context.save_for_backward(output, target)
        return (output - target).square().mean()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, gradient):
        output, target = context.saved_tensors
        return gradient * 2 * (output - target) / output.numel(), None


class OnceTanh(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x.tanh())
        return x.tanh()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, gradient):
        return gradient * (1 - context.saved_tensors[0].square())


class Layer(nn.Module):
    def forward(self, x):
        return OnceTanh.apply(x)


@pytest.mark.parametrize("kind", [Hessian, GaussNewton])
def test_functions_differentiable_only_once_are_refused(kind):
    model, pair = problem()
    mixed = lambda o, t: mse_loss(o, t) + OnceLoss.apply(o, t)  # noqa: E731
    for loss in (OnceLoss.apply, mixed):
        with pytest.raises(RuntimeError, match="once_differentiable"):
            multiply_ones(kind(model, loss, batch=pair))
    by_hand = Differences(model, OnceLoss.apply, batch=pair).dense()
    assert torch.allclose(by_hand, Hessian(model, mse_loss, batch=pair).dense(), atol=1e-7)
    model[1] = Layer()
    with pytest.raises(RuntimeError, match="once_differentiable"):
        multiply_ones(kind(model, mse_loss, batch=pair))


def test_losses_that_are_linear_in_the_outputs():
    model, pair = problem()
    linear = lambda o, t: (o * t).mean()  # noqa: E731
    assert (multiply_ones(GaussNewton(model, linear, batch=pair)) == 0).all()
    assert (
        multiply_ones(Hessian(model[2], lambda o, t: o.mean(), batch=(pair[0].new_ones(5, 4), 0)))
        == 0
    ).all()


def test_gauss_newton_refuses_terms_on_the_weights():
    model, pair = problem()
    penalized = Objective(
        lambda m, b: m(b[0]), lambda o, b: mse_loss(o, b[1]) + model[0].weight.square().sum()
    )
    with pytest.raises(ValueError, match=r"depends directly on 0\.weight"):
        multiply_ones(GaussNewton(model, penalized, batch=pair))
    others = GaussNewton(model, penalized, batch=pair, parameters="2.*")
    plain = GaussNewton(model, mse_loss, batch=pair, parameters="2.*")
    assert torch.allclose(multiply_ones(others), multiply_ones(plain))


@pytest.mark.parametrize("kind", CURVATURES)
def test_a_plain_loss_needs_pairs(kind):
    x = torch.randn(8, 3)
    model = nn.Linear(3, 3)
    for given, said in ((x, "a Tensor"), ((x,), "a tuple of 1"), ({"x": x, "y": x}, "a dict")):
        for data in ({"batch": given}, {"loader": [given]}):
            with pytest.raises(TypeError, match=f"pairs.*got {said}; .* pass an Objective"):
                kind(model, mse_loss, **data)
    whole = Objective(lambda m, b: m(b), lambda o, b: mse_loss(o, b))
    assert torch.equal(
        multiply_ones(kind(model, whole, batch=x)),
        multiply_ones(kind(model, mse_loss, batch=[x, x])),
    )


def test_cross_entropy_with_all_targets_ignored():
    model, (x, _) = problem()
    ignored = torch.full((8,), -100)
    with pytest.raises(NonFiniteProduct, match="the loss is not finite"):
        multiply_ones(Hessian(model, cross_entropy, batch=(x, ignored)))
