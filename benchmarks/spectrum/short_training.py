"""Short training runs, for scripts that measure curvature during or after them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from neumann.lab.data import Dataset, Plan

PROBE_EPOCH = 10**6  # its batches are never trained on: other augmentation, another order

Batch = tuple[Tensor, Tensor]


def train_on_batch(model: nn.Module, batch: Batch, steps: int, lr: float, **options: Any) -> None:
    """Some steps of SGD, since the spectrum at initialization has no outliers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(model(batch[0]), batch[1]))
        optimizer.step()
    optimizer.zero_grad()


def train_with_pauses(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Dataset,
    batch_size: int,
    epochs: int,
    choose_lr: Callable[[int], float],
) -> Iterator[int]:
    """Yield the number of steps taken before each step and after the last, to measure there.

    Runs in bfloat16 on a GPU. `choose_lr` gives the learning rate of a step.
    """
    step = 0
    for epoch in range(epochs):
        for ((inputs, labels),) in data.train.batches(Plan(batch_size, epoch=epoch)):
            yield step
            for group in optimizer.param_groups:
                group["lr"] = choose_lr(step)
            optimizer.zero_grad()
            with torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.is_cuda):
                loss = cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            step += 1
    yield step
