"""Windows of a tokenized text.

An example is a window of `context` tokens, labeled with the tokens that follow each of them.
Windows lie end to end. Training windows start at an offset that depends on seed and epoch, so that
each token appears at every position; one that would reach beyond the end is moved back.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from neumann.lab.data.dataset import MicroBatch, copy_to_device
from neumann.lab.data.plan import Plan
from neumann.lab.errors import UsageError


@dataclass(frozen=True)
class Windows:
    """A stretch of text on the device."""

    tokens: Tensor  # (length,) indices: uint8, int32, or the bits of uint16 as int16
    context: int  # tokens
    unit: str = "character"  # what a token is, for messages

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.context

    def batches(self, plan: Plan) -> Iterator[list[MicroBatch]]:
        plan.count_batches(len(self))
        return self._batches(plan)

    def split(self, fraction: float, seed: int) -> tuple[Self, Self]:
        """Split off the end of the text; the seed has no effect."""
        held_out = round(len(self.tokens) * fraction)
        kept, end = self.tokens[:-held_out], self.tokens[-held_out:]
        if min(len(kept), len(end)) <= self.context:
            raise UsageError(
                f"holding out {fraction} of {len(self.tokens)} {self.unit}s leaves too few for a "
                f"window; lower --context from {self.context}"
            )
        return replace(self, tokens=kept), replace(self, tokens=end)

    def _batches(self, plan: Plan) -> Iterator[list[MicroBatch]]:
        device = self.tokens.device
        starts = plan.order(len(self)) * self.context
        if plan.train:
            offset = int(torch.randint(self.context, (), generator=plan.generator("offset")))
            starts = (starts + offset).clamp_(max=len(self.tokens) - 1 - self.context)
        starts = copy_to_device(starts, device)
        within = torch.arange(self.context + 1, device=device)
        for pieces in plan.slices(len(self)):
            windows = [to_indices(self.tokens[starts[piece, None] + within]) for piece in pieces]
            yield [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows]


def to_indices(tokens: Tensor) -> Tensor:
    """Tokens as stored in `Windows.tokens` → int64."""
    wide = tokens.long()
    return wide & 0xFFFF if tokens.dtype == torch.int16 else wide
