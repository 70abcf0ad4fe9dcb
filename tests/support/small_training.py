"""A small training run that every parallel setup has to reproduce, and its result in one process.

The layers are narrow on purpose: over four ranks their rows divide unevenly, and some ranks get
none. The forces are strong enough that a wrong distance shows at once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from neumann import Neumann
from tests.support.oracle_runs import IMPLEMENTATIONS, use_triton_on_cpu

STEPS = 13  # the last reset is the twelfth
BATCH = 16
# How far from one process: Newton–Schulz works in float32, and what it is given is rounded there.
PRECONDITIONED = {"diagonal": 1e-10, "spectral": 1e-4}
OPTIONS: dict[str, Any] = {
    "lr": 0.05,
    "warmup_steps": 2,
    "reset_steps": 3,
    "cubic": 0.05,
    "repulsive": 0.05,
}


@contextmanager
def implementation_of(name: str) -> Iterator[dict[str, Any]]:
    """The options for an implementation; the CUDA path runs interpreted, as in tests/optim."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "triton":
            use_triton_on_cpu(patch)
        yield IMPLEMENTATIONS.get(name, {})


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)]
    return nn.Sequential(*layers).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64, size: int = BATCH) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 6, dtype=torch.float64, generator=generator).to(dtype)


def share(x: Tensor, rank: int, ranks: int) -> Tensor:
    """A rank's part of a batch."""
    return x.chunk(ranks)[rank]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """A mean over the batch, of values large enough that weights move."""
    return (model(x).squeeze(1) - x.sum(1)).square().mean()


def train(
    model: nn.Module,
    optimizer: Any,
    steps: range = range(STEPS),
    part: Callable[[Tensor], Tensor] = lambda x: x,
) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, part(batch(step, dtype))).backward()
        optimizer.step()


def trained(steps: int = STEPS, dtype: torch.dtype = torch.float64, **options: Any) -> Neumann:
    """The optimizer after so many steps of one process; its state holds everything else."""
    model = network(dtype)
    optimizer = Neumann(model.named_parameters(), **{**OPTIONS, **options})
    train(model, optimizer, range(steps))
    return optimizer


def outcome(optimizer: Neumann) -> dict[str, Tensor]:
    """Weights, evaluation weights and average, by name and whole; a collective where sharded."""

    def whole(tensor: Any) -> Tensor:
        tensor = tensor.detach()
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()

    (group,) = optimizer.param_groups
    weights = dict(zip(group["param_names"], group["params"], strict=True))
    kinds = {"w": weights, "evaluation": optimizer.eval_params()}
    if group["cubic"] or group["repulsive"]:
        kinds["average"] = optimizer.average_params()
    return {
        f"{kind} {name}": whole(t) for kind, named in kinds.items() for name, t in named.items()
    }


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The error of all tensors together, relative to their norm."""
    a, b = (torch.cat([of[name].flatten() for name in theirs]) for of in (ours, theirs))
    return float((a - b).norm() / b.norm())


def furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest error of any tensor, relative to its norm."""
    assert ours.keys() == theirs.keys()
    return max(
        float((ours[name] - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-300))
        for name in theirs
    )
