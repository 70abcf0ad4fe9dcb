"""Loss and accuracy over a split, at whatever weights the model holds."""

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

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
    """The score of the model in evaluation mode; every example counts once over all processes.

    Every process runs the model for every batch: where one has no examples of a ragged last batch
    left, it runs those before once more and does not count them, since a sharded model needs all.
    """
    was_training = model.training
    model.eval()
    sums: Tensor | None = None
    plan = Plan(batch_size, rank=process.rank, ranks=process.ranks, train=False)
    try:
        before: list[tuple[Tensor, Tensor]] = []
        for pieces in source.batches(plan):
            for inputs, labels in pieces or before:
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
                if pieces:
                    sums = batch if sums is None else sums + batch
            before = pieces or before
    finally:
        model.train(was_training)
    if sums is None:  # a split with fewer examples than processes
        device = next(model.parameters()).device
        sums = torch.zeros(3, dtype=torch.float64, device=device)
    loss, right, examples = added_up(sums, process).tolist()
    return Score(loss / examples, 100 * right / examples, round(examples))
