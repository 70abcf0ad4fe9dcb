"""Which examples go into which batch, on which rank, in which order.

Every random choice is a pure function of (seed, epoch, purpose, example). So a run that resumes in
the middle of an epoch sees the batches it would have seen, and ranks and micro-batches only divide
a batch: its examples and their augmentation stay the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from neumann.lab.errors import UsageError

_MINIMUM = {"batch_size": 1, "micro_batches": 1, "epoch": 0, "first": 0, "rank": 0, "ranks": 1}


@dataclass(frozen=True)
class Plan:
    """Which batches of an epoch one rank takes.

    A batch is cut into `ranks * micro_batches` consecutive pieces, in training of equal size. A
    rank takes `micro_batches` of them.
    """

    batch_size: int  # examples in a batch, over all ranks
    micro_batches: int = 1  # pieces in which each rank takes its share of a batch
    seed: int = 0
    epoch: int = 0
    first: int = 0  # skip this many batches: they were done before the run resumed
    rank: int = 0
    ranks: int = 1
    # Training: shuffled, augmented, without the ragged last batch. Evaluation: in order, complete.
    train: bool = True

    def __post_init__(self) -> None:
        for name, minimum in _MINIMUM.items():
            if getattr(self, name) < minimum:
                raise UsageError(f"{name} must be at least {minimum}, got {getattr(self, name)}")
        if self.rank >= self.ranks:
            raise UsageError(f"rank must be below ranks = {self.ranks}, got {self.rank}")
        pieces = self.ranks * self.micro_batches
        if self.train and self.batch_size % pieces:
            raise UsageError(
                f"batch size {self.batch_size} does not divide into {pieces} equal pieces "
                f"({self.ranks} processes × {self.micro_batches} micro-batches)"
            )

    def count_batches(self, examples: int) -> int:
        """Count the batches of an epoch, skipped ones included; UsageError if there is none."""
        if examples == 0:
            raise UsageError("there are no examples to take batches from")
        if not self.train:
            return -(-examples // self.batch_size)
        if self.batch_size > examples:
            raise UsageError(
                f"batch size {self.batch_size} is larger than the training set; "
                f"it must be at most {examples}"
            )
        return examples // self.batch_size

    def slices(self, examples: int) -> Iterator[list[slice]]:
        """For each batch from `first` on, this rank's micro-batches as slices of the epoch's order.

        A ragged batch may leave a rank an empty list; every rank gets as many batches.
        """
        pieces = self.ranks * self.micro_batches
        mine = range(self.rank * self.micro_batches, (self.rank + 1) * self.micro_batches)
        for number in range(self.first, self.count_batches(examples)):
            start = number * self.batch_size
            size = min(self.batch_size, examples - start)
            cuts = [(start + size * k // pieces, start + size * (k + 1) // pieces) for k in mine]
            yield [slice(begin, end) for begin, end in cuts if begin < end]

    def order(self, examples: int) -> Tensor:
        """The order of the examples in this epoch: indices (n,) int64, on the CPU."""
        if not self.train:
            return torch.arange(examples)
        return torch.randperm(examples, generator=self.generator("order"))

    def generator(self, purpose: str) -> torch.Generator:
        """A new CPU generator for one purpose in this epoch."""
        return torch.Generator().manual_seed(derive_seed(purpose, self.seed, self.epoch))


def derive_seed(purpose: str, *numbers: int) -> int:
    """Hash a purpose and any numbers to a seed of 32 bits, which is all torch's generator uses."""
    text = " ".join([purpose, *map(str, numbers)])
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little")
