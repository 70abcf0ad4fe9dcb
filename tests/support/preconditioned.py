"""A small network trained with a preconditioner, and one of the user's own."""

from dataclasses import dataclass

import torch
from torch import nn

from neumann import Neumann

FORMS = [{"foreach": False}, {"foreach": True}, {"fused": True}]
CLOCK = {"warmup_steps": 2, "reset_steps": 4}


def network(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 5)
    ).to(dtype)


def gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p.dtype)


def trained(steps=12, model=None, optimizer=None, first=0, **options):
    model = model or network()
    optimizer = optimizer or Neumann(model.named_parameters(), lr=0.01, **{**CLOCK, **options})
    for step in range(first, first + steps):
        gradients(model, step)
        optimizer.step()
    return model, optimizer


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def memory(optimizer):
    """What a preconditioner keeps."""
    states = optimizer.state.values()
    return [v for state in states for k, v in state.items() if k.startswith("preconditioner_")]


@dataclass(frozen=True)
class Signs:
    """A custom preconditioner: signs of the mean gradient."""

    name = "signs"

    def elementwise(self, parameter):
        return True

    def create(self, parameter):
        return {"mean": torch.zeros_like(parameter)}

    def apply(self, gradients, states):
        means = [
            state["mean"].mul_(0.9).add_(g) for g, state in zip(gradients, states, strict=True)
        ]
        return [mean.sign() for mean in means]
