"""What Neumann reduces to when its extras are off."""

import pytest
import torch

from neumann import Neumann
from tests.support.oracle_runs import IMPLEMENTATIONS


def quadratic(seed: int, size: int = 40):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(size, size, generator=generator, dtype=torch.float64) / size**0.5
    return root @ root.T + 0.05 * torch.eye(size), torch.randn(size, generator=generator).double()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_without_forces_it_is_nesterov_sgd(implementation, weight_decay):
    """torch's SGD(nesterov) whose buffer is the gradient of t = 1 and whose momentum is μ(t)."""
    matrix, target = quadratic(0)
    ours = torch.nn.Parameter(torch.ones(40, dtype=torch.float64))
    theirs = torch.nn.Parameter(torch.ones(40, dtype=torch.float64))
    neumann = Neumann(
        [ours],
        lr=0.2,
        warmup_steps=0,
        reset_steps=0,
        cubic=0.0,
        repulsive=0.0,
        weight_decay=weight_decay,
        **IMPLEMENTATIONS[implementation],
    )
    nesterov = torch.optim.SGD(
        [theirs], lr=0.2, momentum=0.9, nesterov=True, weight_decay=weight_decay
    )
    for t in range(1, 31 if implementation == "triton" else 301):
        ours.grad = matrix @ ours.detach() - target
        neumann.step()
        gradient = matrix @ theirs.detach() - target
        if t == 1:
            # The reset: the gradient becomes the buffer and no weight moves.
            decayed = gradient + weight_decay * theirs.detach()
            nesterov.state[theirs]["momentum_buffer"] = decayed
        else:
            nesterov.param_groups[0]["momentum"] = min(0.9, 1 - 1 / (1 + t))
            theirs.grad = gradient
            nesterov.step()
        error = (ours - theirs).norm() / theirs.norm()
        assert error < 1e-12


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("decoupled", [False, True])
def test_the_warmup_is_sgd(implementation, decoupled):
    steps = 10 if implementation == "triton" else 100
    matrix, target = quadratic(1)
    ours = torch.nn.Parameter(torch.ones(40, dtype=torch.float64))
    theirs = torch.ones(40, dtype=torch.float64)
    optimizer = Neumann(
        [ours],
        lr=0.2,
        warmup_steps=steps,
        reset_steps=10,
        weight_decay=0.1,
        decoupled_weight_decay=decoupled,
        **IMPLEMENTATIONS[implementation],
    )
    for _ in range(steps):
        ours.grad = matrix @ ours.detach() - target
        optimizer.step()
        theirs = theirs - 0.2 * (matrix @ theirs - target) - 0.2 * 0.1 * theirs
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=0)
    assert torch.equal(optimizer.eval_params()[0], ours)
    assert torch.allclose(optimizer.average_params()[0], torch.ones(40, dtype=torch.float64))
