"""What a data set is to the rest of the lab: one source of batches to train on, one to test on."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from neumann.lab.data.plan import Plan, key
from neumann.lab.errors import UsageError

Piece = tuple[Tensor, Tensor]  # inputs and labels of a micro-batch, on the device

KINDS = ("vector", "image", "text")


class Source(Protocol):
    """The examples of one split."""

    def __len__(self) -> int:
        """How many examples there are."""

    def batches(self, plan: Plan) -> Iterator[list[Piece]]:
        """The batches of an epoch, each as the micro-batches of this rank.

        In training `len(self) // batch_size` batches; in evaluation every example exactly once
        over all ranks. A plan that does not fit is a UsageError at the call, not at the first
        batch.
        """

    def split(self, fraction: float, seed: int) -> tuple[Self, Self]:
        """The source without a part of about this fraction, and that part."""


@dataclass(frozen=True)
class Dataset:
    """A training and a test split, and what a model has to know of them."""

    name: str  # as it was given to `load`
    train: Source
    test: Source
    classes: int  # of labels; for text the size of the alphabet
    shape: tuple[int, ...]  # of one input: (64,), (3, 32, 32), (context,)
    kind: str  # "vector", "image" or "text"

    def held_out(self, fraction: float = 0.1, seed: int = 0) -> "Dataset":
        """The same without its test set: a fixed part of the training set stands in for it.

        The part is random, except for text, where it is the end of the training text: windows
        from its middle would share characters with the training windows.
        """
        if not 0 < fraction < 1:
            raise UsageError(f"the held-out fraction must be between 0 and 1, got {fraction}")
        kept, held = self.train.split(fraction, seed)
        return replace(self, train=kept, test=held)


def split_indices(examples: int, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices (n,) of the examples kept and of those held out, each in rising order."""
    held = round(examples * fraction)
    if not 0 < held < examples:
        raise UsageError(f"holding out {fraction} of {examples} examples leaves one part empty")
    generator = torch.Generator().manual_seed(key("held out", seed))
    order = torch.randperm(examples, generator=generator)
    return order[held:].sort().values, order[:held].sort().values


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The CPU tensor on the device, without making the host wait for a GPU."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
