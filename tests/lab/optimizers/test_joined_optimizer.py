"""Several optimizers as one: they step as if alone, and one checkpoint brings back all of them."""

import io

import pytest
import torch
from torch.optim import SGD, AdamW

from neumann.lab.optimizers.joined_optimizer import JoinedOptimizer


def make():
    torch.manual_seed(0)
    a, b = (torch.nn.Parameter(torch.randn(3, 2)) for _ in range(2))
    parts = [SGD([a], lr=0.1, momentum=0.9), AdamW([b], lr=0.01)]
    return [a, b], parts


def train(parameters, optimizers, first, last):
    for step in range(first, last):
        for p in parameters:
            p.grad = p.detach().sin() + step
        for optimizer in optimizers:
            optimizer.step()
    return parameters


def test_the_parts_step_as_if_they_were_alone():
    parameters, parts = make()
    alone, parts_alone = make()
    train(parameters, [JoinedOptimizer(parts)], 0, 5)
    train(alone, parts_alone, 0, 5)
    assert all(torch.equal(a, b) for a, b in zip(parameters, alone, strict=True))


def test_a_saved_state_continues_with_the_same_bits():
    whole, parts = make()
    train(whole, [JoinedOptimizer(parts)], 0, 6)
    first, parts = make()
    optimizer = JoinedOptimizer(parts)
    train(first, [optimizer], 0, 3)
    file = io.BytesIO()
    torch.save({"w": [p.detach() for p in first], "o": optimizer.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    second, parts = make()
    for p, value in zip(second, saved["w"], strict=True):
        p.data.copy_(value)
    loaded = JoinedOptimizer(parts)
    loaded.load_state_dict(saved["o"])
    train(second, [loaded], 3, 6)
    assert all(torch.equal(a, b) for a, b in zip(whole, second, strict=True))


@pytest.mark.parametrize("loaded", [False, True])
def test_a_schedule_sets_the_rates_of_the_parts(loaded):
    parameters, parts = make()
    optimizer = JoinedOptimizer(parts)
    if loaded:
        optimizer.load_state_dict(optimizer.state_dict())
    before = [p.detach().clone() for p in parameters]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(parameters, [optimizer], 0, 2)
    assert all(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))
    optimizer.zero_grad()
    assert [p.grad for p in parameters] == [None, None]


def test_a_closure_is_evaluated_once():
    _, parts = make()
    calls = []
    loss = JoinedOptimizer(parts).step(lambda: calls.append(1) or torch.tensor(2.0))
    assert (loss, calls) == (2.0, [1])


def test_a_parameter_of_two_parts_is_refused():
    (a, _), parts = make()
    with pytest.raises(ValueError, match="more than one parameter group"):
        JoinedOptimizer([*parts, SGD([a], lr=0.1)])
