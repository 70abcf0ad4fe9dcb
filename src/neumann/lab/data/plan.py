"""Which examples go into which batch, on which process and in which order.

Everything random is a pure function of (seed, epoch, purpose, example): there is no generator that
lives on. So a run that resumes in mid-epoch sees the batches it would have seen, and ranks and
micro-batches only partition a batch, whose examples and augmentation stay the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from neumann.lab.errors import UsageError


@dataclass(frozen=True)
class Plan:
    """Which batches of an epoch a process takes.

    A batch is cut into `ranks * micro_batches` consecutive pieces; a process takes
    `micro_batches` of them. Training pieces are equal, so the sizes have to divide.
    """

    batch_size: int  # examples of a batch over all processes
    micro_batches: int = 1  # pieces in which each process takes its share of a batch
    seed: int = 0
    epoch: int = 0
    first: int = 0  # batches already done, skipped
    rank: int = 0
    ranks: int = 1
    train: bool = True  # shuffled, augmented, the ragged last batch dropped; else in order, whole

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.rank >= self.ranks:
            raise UsageError(f"rank must be below ranks = {self.ranks}, got {self.rank}")
        pieces = self.ranks * self.micro_batches
        if self.train and self.batch_size % pieces:
            raise UsageError(
                f"batch size {self.batch_size} does not divide into {pieces} equal pieces "
                f"({self.ranks} processes × {self.micro_batches} micro-batches)"
            )

    def batches_of(self, examples: int) -> int:
        """How many batches an epoch over this many examples has, those before `first` included.

        Raises UsageError where training would have none.
        """
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

    def spans(self, examples: int) -> Iterator[list[slice]]:
        """For each batch from `first` on, the pieces of this rank as slices of the epoch's order.

        Where a ragged batch has fewer examples than pieces, empty pieces are left out; a rank may
        get none, but every rank gets the same number of batches.
        """
        pieces = self.ranks * self.micro_batches
        mine = range(self.rank * self.micro_batches, (self.rank + 1) * self.micro_batches)
        for number in range(self.first, self.batches_of(examples)):
            start = number * self.batch_size
            size = min(self.batch_size, examples - start)
            cuts = [(start + size * k // pieces, start + size * (k + 1) // pieces) for k in mine]
            yield [slice(begin, end) for begin, end in cuts if begin < end]

    def order(self, examples: int) -> Tensor:
        """The examples (n,) int64, on the CPU, in the order of this epoch."""
        if not self.train:
            return torch.arange(examples)
        return torch.randperm(examples, generator=self.generator("order"))

    def generator(self, purpose: str) -> torch.Generator:
        """A fresh CPU generator for one purpose of this epoch."""
        return torch.Generator().manual_seed(key(purpose, self.seed, self.epoch))


def key(purpose: str, *numbers: int) -> int:
    """A seed of 32 bits that depends on every number; 32 are all that torch's generator takes."""
    text = " ".join([purpose, *map(str, numbers)])
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little")


_LEAST = {"batch_size": 1, "micro_batches": 1, "epoch": 0, "first": 0, "rank": 0, "ranks": 1}
