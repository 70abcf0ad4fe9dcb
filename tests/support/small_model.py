"""A small model in training, for tests of what the optimizer does around the update."""

import torch
from torch import nn

from neumann import Neumann

CLOCK = {"warmup_steps": 3, "reset_steps": 4}
STRONG = {"cubic": 0.05, "repulsive": 0.05}


def model_and_optimizer(named=True, dtype=torch.float64, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    params = model.named_parameters() if named else model.parameters()
    return model, Neumann(params, **{"lr": 0.1, **CLOCK, **options})


def train(model, optimizer, steps=1, start=0, scheduler=None):
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 5, generator=generator).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
