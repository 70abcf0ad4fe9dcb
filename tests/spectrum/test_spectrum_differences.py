"""Steps of differences in weights of any size."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from neumann.spectrum import Differences, Hessian, Objective, extremes


def linear(size, dtype=torch.float32):
    torch.manual_seed(1)
    model = nn.Linear(40, 1, bias=False).to(dtype)
    with torch.no_grad():
        model.weight.uniform_(size, 1.9 * size)
    x = torch.randn(64, 40, dtype=dtype) / size
    return model, (x, torch.randn(64, 1, dtype=dtype))


@pytest.mark.parametrize("size", [1.0, 1e3, 1e5, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_any_size(size, dtype):
    model, pair = linear(size, dtype)
    exact = torch.linalg.eigvalsh(Hessian(model, mse_loss, batch=pair).dense().double())
    found = extremes(Differences(model, mse_loss, batch=pair), tolerance=0.1)
    assert abs(found.largest.value - float(exact[-1])) <= found.largest.error
    assert found.largest.error < 0.2 * float(exact[-1])
    assert found.largest.value > 0.9 * float(exact[-1])


def test_a_step_that_the_weights_swallow_is_refused():
    model, pair = linear(1e5)
    before = model.weight.clone()
    for step in (1e-6, 1e-3, 1e-2):
        operator = Differences(model, mse_loss, batch=pair, step=step)
        with pytest.raises(ValueError, match="is lost in the rounding of the weights"):
            operator @ torch.ones(40)
    assert torch.equal(model.weight, before)
    wide = Differences(model, mse_loss, batch=pair, step=1e3) @ torch.ones(40)
    exact = Hessian(model, mse_loss, batch=pair) @ torch.ones(40)
    assert float((wide - exact).norm()) < 0.01 * float(exact.norm())


def test_the_step_that_was_taken_is_the_one_divided_by():
    """A coordinate direction stays one when it is rounded; only its length changes."""
    model, _ = linear(1e3)
    here = model.weight.detach().clone()
    bowl = Objective(lambda m, b: m.weight - here, lambda out, b: out.square().sum() / 2)
    step = 1.7e-4  # units in the last place are 1.2e-4
    assert abs(float((here[0, 7] + step) - (here[0, 7] - step)) / (2 * step) - 1) > 0.1
    v = torch.zeros(40)
    v[7] = 1
    operator = Differences(model, bowl, batch=torch.ones(1), step=step)
    assert torch.allclose(operator @ v, v, rtol=1e-6)


def test_step_and_error_go_with_the_weights_of_the_session():
    model, pair = linear(1.0)
    operator = Differences(model, mse_loss, batch=pair)
    small = operator.product_error()
    with torch.no_grad():
        model.weight.mul_(1e5)
    assert operator.product_error() != small
