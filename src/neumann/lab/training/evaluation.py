"""Loss, accuracy and top-5, for text bits per byte, over a split, at the weights held now.

With BatchNorm the test set is scored twice: with the running statistics, which were gathered at
other weights, and with statistics recalibrated at the weights that are evaluated.
"""

import contextlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from neumann.lab.config import TrainConfig
from neumann.lab.data import Dataset, Plan, Source
from neumann.lab.training.batchnorm_layers import average_statistics, has_batchnorm, keep_statistics
from neumann.lab.training.gradients import Context, Pieces
from neumann.lab.training.inputs import plan_epoch
from neumann.lab.training.processes import Process, sum_over_processes
from neumann.optim import recalibrate_batchnorm

RECALIBRATION_EXAMPLES = 5_000
MAX_LOGITS = 2**28  # at once, 1 GiB in float32; only text has that many
TOP = 5
MAX_EXPONENT = 700  # of e, within floats


@dataclass(frozen=True)
class Score:
    loss: float  # mean cross-entropy, nats
    accuracy: float  # %
    examples: int  # or tokens
    bits_per_byte: float | None = None  # of text
    top5: float | None = None  # %, the label is among the five largest logits

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < MAX_EXPONENT else math.inf

    def as_fields(self) -> dict[str, float]:
        """What the records hold of it."""
        found = {"loss": self.loss, "accuracy": self.accuracy}
        if self.bits_per_byte is not None:
            found |= {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        if self.top5 is not None:
            found["top5"] = self.top5
        return found


def evaluate_twice(
    model: nn.Module, dataset: Dataset, config: TrainConfig, process: Process, autocast: Context
) -> tuple[Score, Score | None]:
    """Score the test set with running and, if there is BatchNorm, recalibrated statistics."""
    batch = min(max(config.batch_size, 512), 4096)  # a larger one saves no time
    if dataset.kind == "text":
        batch = min(batch, max(MAX_LOGITS // (dataset.shape[0] * dataset.classes), 1))
    top5 = dataset.kind != "text" and dataset.classes > TOP
    arguments = (dataset.test, batch, process, autocast(), dataset.token_bytes, top5)
    score = evaluate(model, *arguments)
    if not has_batchnorm(model):
        return score, None
    plan = plan_epoch(config, process, 0)
    inputs = (piece for pieces in dataset.train.batches(plan) for piece, _ in pieces)
    at_once = config.batch_size // plan.micro_batches  # in all processes together
    with keep_statistics(model):
        with autocast():
            batches = -(-RECALIBRATION_EXAMPLES // at_once)
            recalibrate_batchnorm(model, inputs, batches=batches)
        average_statistics(model, process)
        return score, evaluate(model, *arguments)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    source: Source,
    batch_size: int,
    process: Process,
    autocast: contextlib.AbstractContextManager[object],
    token_bytes: Tensor | None = None,
    top5: bool = False,
) -> Score:
    """Score the model in evaluation mode; every example counts once over all processes.

    `token_bytes` (classes,) has the bytes of each token of a text. `top5` needs five classes.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    # loss, correct, examples, bytes, correct among five
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    plan = Plan(batch_size, rank=process.rank, ranks=process.ranks, train=False)
    try:
        # A sharded model needs every process to run every batch. So a process without examples in
        # an incomplete last batch runs the previous ones again and does not count them.
        previous: Pieces = []
        for pieces in source.batches(plan):
            for inputs, labels in pieces or previous:
                with autocast:
                    logits = model(inputs)
                logits = logits.float().flatten(0, -2)
                labels = labels.flatten()
                if pieces:
                    sums[0] += cross_entropy(logits, labels, reduction="sum")
                    sums[1] += (logits.argmax(-1) == labels).sum()
                    sums[2] += len(labels)
                    if token_bytes is not None:
                        sums[3] += token_bytes[labels].sum()
                    if top5:
                        sums[4] += (logits.topk(TOP).indices == labels[:, None]).sum()
            previous = pieces or previous
    finally:
        model.train(was_training)
    loss, correct, examples, length, among = sum_over_processes(sums, process).tolist()
    bits = None if token_bytes is None else loss / math.log(2) / length
    share = 100 * among / examples if top5 else None
    return Score(loss / examples, 100 * correct / examples, round(examples), bits, share)
