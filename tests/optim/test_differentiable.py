"""autograd through a step: gradients with respect to weights, gradient, state and lr."""

import pytest
import torch

from neumann import Neumann

SIZE = 4


def stepped(w, g, m, offset, lr, steps_before, options):
    """One step from a given state, as a function that autograd can look through."""
    w = w.clone()
    w.grad = g
    optimizer = Neumann(
        [w],
        lr=lr,
        warmup_steps=2,
        reset_steps=3,
        cubic=0.1,
        repulsive=0.1,
        differentiable=True,
        **options,
    )
    state = optimizer.state[w]
    state["step"].fill_(steps_before)
    state["iterate"], state["offset"] = m.clone(), offset.clone()
    optimizer._store.scalars["distance_squared"] = offset.square().sum()
    optimizer.step()
    return w, state["iterate"], state["offset"]


@pytest.mark.parametrize("steps_before", [0, 2, 4], ids=["warm-up", "reset", "iterate"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bounded": False},
        {"weight_decay": 0.3, "maximize": True},
        {"weight_decay": 0.3, "decoupled_weight_decay": True},
    ],
)
def test_gradcheck(steps_before, options):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(SIZE, generator=generator, dtype=torch.float64) for _ in range(4)]
    inputs.append(torch.tensor(0.2, dtype=torch.float64))
    for tensor in inputs:
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *tensors: stepped(*tensors, steps_before, options), inputs
    )


def test_the_derivative_reaches_the_learning_rate_through_a_run():
    def loss(lr):
        w = torch.ones(3, dtype=torch.float64, requires_grad=True).clone()
        optimizer = Neumann([w], lr=lr, warmup_steps=1, reset_steps=0, differentiable=True)
        for _ in range(6):
            w.grad = 2 * w
            optimizer.step()
        return w.square().sum()

    lr = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, [lr])


def test_the_derivative_goes_through_the_distance():
    """Strong forces, so that r of one step, summed in the one before, matters."""

    def loss(lr, start):
        w = start.clone()
        optimizer = Neumann(
            [w],
            lr=lr,
            warmup_steps=1,
            reset_steps=0,
            cubic=0.5,
            repulsive=0.5,
            differentiable=True,
        )
        for _ in range(5):
            w.grad = 2 * w
            optimizer.step()
        return w

    lr = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    start = torch.tensor([1.0, -0.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, [lr, start])


@pytest.mark.parametrize("bounded", [True, False])
def test_a_distance_of_zero_has_a_derivative(bounded):
    lr = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    w = torch.zeros(3, dtype=torch.float64, requires_grad=True).clone()
    optimizer = Neumann(
        [w], lr=lr, warmup_steps=1, reset_steps=0, bounded=bounded, differentiable=True
    )
    for step in range(5):  # the first gradients are 0, so that r is 0 when the iteration starts
        w.grad = 2 * (w - (0.0 if step < 2 else 1.0))
        optimizer.step()
    (derivative,) = torch.autograd.grad(w.square().sum(), lr)
    assert torch.isfinite(derivative)
    assert derivative > 0


def test_a_plain_step_keeps_no_graph():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = Neumann([p], lr=0.1, warmup_steps=1, reset_steps=0, foreach=False)
    for _ in range(4):
        p.grad = torch.ones(3)
        optimizer.step()
    assert p.is_leaf
    assert all(not value.requires_grad for value in optimizer.state[p].values())
