"""Hessian products against dense matrices and other libraries, and on models that are hard to
differentiate twice.
"""

import importlib
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention

from neumann.spectrum import Differences, GaussNewton, Hessian, Objective, extremes
from tests.support.small_networks import as_type, batch, cnn, dense_hessian, problem, vectors

METHODS = ("auto", "retained", "double-backward", "forward-over-reverse")


def import_quietly(name):
    """Import a development dependency and ignore its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            return pytest.skip(f"{name} is not installed")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("norm", [False, True])
def test_every_method_gives_the_dense_hessian(method, norm):
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


def test_against_curvlinops():
    library = import_quietly("curvlinops")
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
    library = import_quietly("hessian_eigenthings")
    model, pair = problem(norm=False)
    theirs = library.HessianOperator(model, [pair], library.supervised_loss(cross_entropy))
    ours = Hessian(model, cross_entropy, batch=pair)
    v = vectors(ours.size, 1)[:, 0]
    assert torch.allclose(ours @ v, theirs.matvec(v), atol=1e-12)
    found = extremes(ours, tolerance=1e-8)
    top = library.lanczos(theirs, k=1, max_iter=40, which="LA", seed=0).eigenvalues[0]
    assert found.largest.value == pytest.approx(float(top), rel=1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_parameters_that_the_loss_does_not_use(method):
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
    assert operator.about.names[0] == "linear"  # the loss is linear in it
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
    """The fast kernels of these layers cannot be differentiated twice."""
    torch.manual_seed(0)
    model, pair = kind().double(), batch(6, 5, 4)
    operator = Hessian(model, cross_entropy, batch=pair)
    v = vectors(operator.size)
    near = Differences(model, cross_entropy, batch=pair) @ v
    assert torch.allclose(operator @ v, near, atol=1e-7)


class OnceOnly(torch.autograd.Function):
    """A square whose derivative cannot be differentiated."""

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, gradient):
        return 2 * context.saved_tensors[0] * gradient


def test_the_error_without_second_derivatives_suggests_differences():
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    objective = Objective(lambda m, x: m(x), lambda out, x: OnceOnly.apply(out).tanh().mean())
    x = torch.randn(8, 3, dtype=torch.float64)
    operator = Hessian(model, objective, batch=x)
    with pytest.raises(RuntimeError, match="use Differences, which only needs gradients"):
        operator @ torch.ones(4, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        Hessian(model, objective, batch=x, method="retained") @ torch.ones(4, dtype=torch.float64)
    squared = Objective(lambda m, b: m(b), lambda out, b: out.square().tanh().mean())
    exact = Hessian(model, squared, batch=x)
    near = Differences(model, objective, batch=x)
    assert torch.allclose(near.dense(), exact.dense(), atol=1e-7)


class ForwardOnly(torch.autograd.Function):
    """A square whose derivative has a forward derivative but no backward one."""

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


def test_method_and_step_are_checked():
    model, pair = problem()
    with pytest.raises(ValueError, match="method must be one of auto, retained"):
        Hessian(model, cross_entropy, batch=pair, method="backward")
    with pytest.raises(ValueError, match="step must be finite"):
        Differences(model, cross_entropy, batch=pair, step=0.0)


def test_a_compiled_model_is_unwrapped():
    model, pair = problem()
    compiled = torch.compile(model, backend="eager")
    operator = Hessian(compiled, cross_entropy, batch=pair)
    assert torch.allclose(operator.dense(), dense_hessian(model, pair), atol=1e-12)
