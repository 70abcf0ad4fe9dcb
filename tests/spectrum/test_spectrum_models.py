"""Models that are hard to differentiate twice, in one way or another."""

import pytest
import torch
from small_networks import batch, dense_hessian, problem, vectors
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention

from neumann.spectrum import (
    Differences,
    GaussNewton,
    Hessian,
    Objective,
)

METHODS = ("auto", "retained", "double-backward", "forward-over-reverse")


@pytest.mark.parametrize("method", METHODS)
def test_parameters_the_loss_does_not_reach(method):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)
            self.linear = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.used(x).square().mean() + self.linear.sum()

    torch.manual_seed(0)
    objective = Objective(lambda model, x: model(x), lambda output, x: output)
    operator = Hessian(Branches(), objective, batch=torch.randn(4, 3), method=method)
    dense = operator.dense()
    assert operator.about.names[0] == "linear"  # in which the loss is linear
    assert (dense[:1] == 0).all()
    assert (dense[-8:] == 0).all()
    assert dense[1:9, 1:9].abs().max() > 0
    alone = Hessian(
        operator.model, objective, batch=torch.randn(4, 3), method=method, parameters="unused.*"
    )
    assert (alone @ torch.ones(8) == 0).all()


def test_tied_weights_count_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x):
            return self.head(self.embedding(x).tanh())

    torch.manual_seed(0)
    model = Tied().double()
    pair = torch.randint(5, (7,)), torch.randint(5, (7,))
    whole = [Hessian(model, cross_entropy, batch=pair, method=m).dense() for m in METHODS]
    assert whole[0].shape == (20, 20)
    assert all(torch.allclose(other, whole[0]) for other in whole)
    exact = Differences(model, cross_entropy, batch=pair).dense()
    assert torch.allclose(whole[0], exact, atol=1e-7)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.out = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x):
        query, key, value = self.project(x)[:, None].chunk(3, -1)
        return self.out(scaled_dot_product_attention(query, key, value).squeeze(1).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.out = nn.GRU(4, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x):
        return self.out(self.cells(x)[0].mean(1))


@pytest.mark.parametrize("kind", [Attention, Recurrent])
def test_attention_and_recurrent_layers(kind):
    """Their fast kernels cannot be differentiated twice."""
    torch.manual_seed(0)
    model, pair = kind().double(), batch(6, 5, 4)
    operator = Hessian(model, cross_entropy, batch=pair)
    v = vectors(operator.size)
    near = Differences(model, cross_entropy, batch=pair) @ v
    assert torch.allclose(operator @ v, near, atol=1e-7)


class OnceOnly(torch.autograd.Function):
    """A square whose derivative cannot be differentiated backwards."""

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, gradient):
        return 2 * context.saved_tensors[0] * gradient


def test_without_second_derivatives_the_error_names_the_way_out():
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    objective = Objective(lambda m, x: m(x), lambda out, x: OnceOnly.apply(out).tanh().mean())
    x = torch.randn(8, 3, dtype=torch.float64)
    operator = Hessian(model, objective, batch=x)
    with pytest.raises(RuntimeError, match="Differences needs its gradients alone"):
        operator @ torch.ones(4, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        Hessian(model, objective, batch=x, method="retained") @ torch.ones(4, dtype=torch.float64)
    squared = Objective(lambda m, b: m(b), lambda out, b: out.square().tanh().mean())
    exact = Hessian(model, squared, batch=x)
    near = Differences(model, objective, batch=x)
    assert torch.allclose(near.dense(), exact.dense(), atol=1e-7)


class ForwardOnly(torch.autograd.Function):
    """A square with a forward derivative, whose derivative has no backward but a forward one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(context, inputs, output):
        context.save_for_backward(*inputs)
        context.save_for_forward(*inputs)

    @staticmethod
    def backward(context, gradient):
        return Twice.apply(context.saved_tensors[0], gradient)

    @staticmethod
    def jvp(context, tangent):
        return 2 * context.saved_tensors[0] * tangent


class Twice(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, gradient):
        return 2 * x * gradient

    @staticmethod
    def setup_context(context, inputs, output):
        context.save_for_backward(*inputs)
        context.save_for_forward(*inputs)

    @staticmethod
    def backward(context, gradient):
        raise RuntimeError("no second backward")

    @staticmethod
    def jvp(context, x_tangent, gradient_tangent):
        x, gradient = context.saved_tensors
        return 2 * (x_tangent * gradient + x * gradient_tangent)


def test_auto_falls_back_to_forward_over_reverse():
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    x = torch.randn(8, 3, dtype=torch.float64)
    objective = Objective(lambda m, b: m(b), lambda out, b: ForwardOnly.apply(out).mean())
    operator = Hessian(model, objective, batch=x)
    assert operator.method == "retained"
    exact = Hessian(model, lambda out, y: mse_loss(out, y), batch=(x, torch.zeros(8, 1).double()))
    assert torch.allclose(operator.dense(), exact.dense())
    assert operator.method == "forward-over-reverse"


def test_methods_are_named():
    model, pair = problem()
    with pytest.raises(ValueError, match="method must be one of auto, retained"):
        Hessian(model, cross_entropy, batch=pair, method="backward")
    with pytest.raises(ValueError, match="step must be finite"):
        Differences(model, cross_entropy, batch=pair, step=0.0)


def test_a_compiled_model_is_measured_as_it_was_written():
    model, pair = problem()
    compiled = torch.compile(model, backend="eager")
    operator = Hessian(compiled, cross_entropy, batch=pair)
    assert torch.allclose(operator.dense(), dense_hessian(model, pair), atol=1e-12)


@pytest.mark.parametrize("kind", [Hessian, GaussNewton, Differences])
def test_sparse_gradients_are_refused_where_they_are_in_the_matrix(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Tanh(), nn.Linear(4, 3)).double()
    pair = torch.randint(5, (7,)), torch.randint(3, (7,))
    with pytest.raises(ValueError, match="0 is an embedding with sparse=True"):
        kind(model, cross_entropy, batch=pair)
    head = kind(model, cross_entropy, batch=pair, parameters="2.*").dense()
    model[0].sparse = False
    whole = kind(model, cross_entropy, batch=pair).dense()
    assert torch.allclose(whole[20:, 20:], head, atol=1e-7)
