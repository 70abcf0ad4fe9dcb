"""A small problem trained in a plain loop, which every trainer must match bit for bit."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from neumann import Neumann

EPOCH = 6  # steps
# Warm-up to step 3, resets at 4, 8 and 16, everything else iterates.
OPTIONS = {"lr": 0.1, "warmup_steps": 3, "reset_steps": 4, "cubic": 0.05, "repulsive": 0.05}


def dataset():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16 * EPOCH, 5, generator=generator)
    return TensorDataset(x, torch.randint(3, (len(x),), generator=generator))


def loader():
    return DataLoader(dataset(), batch_size=16)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def run_plain_loop(steps, accumulate=1):
    """Return training and evaluation weights after each step, from step 0, without switching."""
    model = network()
    optimizer = Neumann(model.named_parameters(), **OPTIONS)
    batches = list(loader())
    trained, evaluated = [], []
    for step in range(steps + 1):
        if step:
            optimizer.zero_grad()
            for micro in range((step - 1) * accumulate, step * accumulate):
                x, y = batches[micro % EPOCH]
                (cross_entropy(model(x), y) / accumulate).backward()
            optimizer.step()
        trained.append(weights(model))
        evaluated.append(list(optimizer.eval_params().values()))
    return trained, evaluated
