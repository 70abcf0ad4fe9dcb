"""Small networks and data, and their dense Hessians in float64."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from neumann.spectrum import Differences, GaussNewton, Hessian

CURVATURES = (Hessian, GaussNewton, Differences)

Pair = tuple[Tensor, Tensor]


def mlp(
    inputs: int, hidden: int, classes: int, *, norm: bool = False, layers: int = 1
) -> nn.Sequential:
    parts: list[nn.Module] = []
    before = inputs
    for _ in range(layers):
        parts += [nn.Linear(before, hidden), *([nn.BatchNorm1d(hidden)] if norm else []), nn.Tanh()]
        before = hidden
    return nn.Sequential(*parts, nn.Linear(before, classes))


def tiny_mlp(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return mlp(5, 6, 3, norm=norm).double()


def cnn(channels: int, classes: int, *, norm: bool = False) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1, bias=not norm),
        *([nn.BatchNorm2d(channels)] if norm else []),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, classes),
    )


def batch(examples: int, *shape: int, classes: int = 3, seed: int = 0) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(examples, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (examples,), generator=generator)


def as_type(pair: Pair, dtype: torch.dtype) -> Pair:
    return pair[0].to(dtype), pair[1]


def trained(model: nn.Module, pair: Pair, steps: int) -> nn.Module:
    """Train for some steps, because the spectrum at initialization has no outliers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(pair[0]), pair[1]).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model


def dense_hessian(model: nn.Module, pair: Pair, names: list[str] | None = None) -> Tensor:
    """Return the Hessian (n, n) of the mean cross-entropy, with BatchNorm over the batch."""
    model = copy.deepcopy(model).double()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.train()
            module.track_running_stats = False
    weights = {name: p.detach() for name, p in model.named_parameters()}
    chosen = {name: weights[name] for name in names or weights}
    flat = torch.cat([w.reshape(-1) for w in chosen.values()])
    sizes = [w.numel() for w in chosen.values()]

    def loss(vector: Tensor) -> Any:
        pieces = vector.split(sizes)
        changed = {
            name: piece.view_as(w) for (name, w), piece in zip(chosen.items(), pieces, strict=True)
        }
        return cross_entropy(functional_call(model, changed, (pair[0].double(),)), pair[1])

    return jacrev(grad(loss))(flat)


def problem(norm=True, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return mlp(5, 6, 3, norm=norm).to(dtype), as_type(batch(14, 5, seed=seed), dtype)


def vectors(size, count=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, count, generator=generator, dtype=torch.float64).to(dtype)


def multiply_ones(operator):
    return operator @ torch.ones(operator.size, dtype=operator.dtype)
