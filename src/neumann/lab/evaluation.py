"""Loss and accuracy over a split, at whatever weights the model holds."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from neumann.lab.data import Plan, Source
from neumann.lab.processes import Process, added_up


@dataclass(frozen=True)
class Score:
    """One evaluation."""

    loss: float  # mean cross-entropy, nats
    accuracy: float  # %
    examples: int  # or characters


@torch.no_grad()
def evaluate(
    model: nn.Module,
    source: Source,
    batch_size: int,
    process: Process,
    autocast: contextlib.AbstractContextManager[object],
) -> Score:
    """The score of the model in evaluation mode; every example counts once over all processes."""
    was_training = model.training
    model.eval()
    sums: Tensor | None = None
    plan = Plan(batch_size, rank=process.rank, ranks=process.ranks, train=False)
    try:
        for pieces in source.batches(plan):
            for inputs, labels in pieces:
                with autocast:
                    logits = model(inputs)
                logits = logits.float().flatten(0, -2)
                labels = labels.flatten()
                batch = torch.stack(
                    [
                        cross_entropy(logits, labels, reduction="sum").double(),
                        (logits.argmax(-1) == labels).sum().double(),
                        torch.full((), len(labels), dtype=torch.float64, device=labels.device),
                    ]
                )
                sums = batch if sums is None else sums + batch
    finally:
        model.train(was_training)
    if sums is None:  # a split with fewer examples than processes
        device = next(model.parameters()).device
        sums = torch.zeros(3, dtype=torch.float64, device=device)
    loss, right, examples = added_up(sums, process).tolist()
    return Score(loss / examples, 100 * right / examples, round(examples))


def has_batchnorm(model: nn.Module) -> bool:
    """Whether the model keeps running statistics."""
    return any(_keeps_statistics(module) for module in model.modules())


@contextlib.contextmanager
def kept_statistics(model: nn.Module) -> Iterator[None]:
    """BatchNorm's running statistics come back after the block."""
    buffers = [
        buffer
        for module in model.modules()
        if _keeps_statistics(module)
        for buffer in module.buffers(recurse=False)
    ]
    saved = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in zip(buffers, saved, strict=True):
                buffer.copy_(before)


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.track_running_stats
