"""A text file, read as characters; the last tenth is the test split.

An example is a window of `context` characters, labeled with the characters that follow each of
them. Windows lie end to end. Training windows start at an offset that depends on seed and epoch, so
that each character appears at every position; one that would reach beyond the end is moved back.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from neumann.lab.data.dataset import Dataset, MicroBatch, Request, copy_to_device
from neumann.lab.data.plan import Plan
from neumann.lab.errors import UsageError

TEST = 0.1  # of the characters


@dataclass(frozen=True)
class Windows:
    """A stretch of text on the device."""

    characters: Tensor  # (length,) int32, indices into the alphabet
    context: int  # characters

    def __len__(self) -> int:
        return max(0, len(self.characters) - 1) // self.context

    def batches(self, plan: Plan) -> Iterator[list[MicroBatch]]:
        plan.count_batches(len(self))
        return self._batches(plan)

    def split(self, fraction: float, seed: int) -> tuple[Self, Self]:
        """Split off the end of the text; the seed has no effect."""
        held_out = round(len(self.characters) * fraction)
        kept, end = self.characters[:-held_out], self.characters[-held_out:]
        if min(len(kept), len(end)) <= self.context:
            raise UsageError(
                f"holding out {fraction} of {len(self.characters)} characters leaves less than a "
                f"window of {self.context} and the character after it"
            )
        return replace(self, characters=kept), replace(self, characters=end)

    def _batches(self, plan: Plan) -> Iterator[list[MicroBatch]]:
        device = self.characters.device
        starts = plan.order(len(self)) * self.context
        if plan.train:
            offset = int(torch.randint(self.context, (), generator=plan.generator("offset")))
            starts = (starts + offset).clamp_(max=len(self.characters) - 1 - self.context)
        starts = copy_to_device(starts, device)
        within = torch.arange(self.context + 1, device=device)
        for pieces in plan.slices(len(self)):
            windows = [self.characters[starts[piece, None] + within].long() for piece in pieces]
            yield [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows]


def load_text(request: Request) -> Dataset:
    """Load `text:FILE`; its classes are the characters that occur in the file."""
    request.refuse_augmentation()
    path = request.find_path("text:FILE")
    context = request.context
    if context < 1:
        raise UsageError(f"context must be at least 1 character, got {context}")
    try:
        content = path.read_bytes().decode()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a text in UTF-8: {error}") from error
    code_points = np.frombuffer(content.encode("utf-32-le"), dtype=np.uint32)
    test = round(len(code_points) * TEST)
    if test <= context:
        raise UsageError(
            f"{path} has {len(code_points)} characters; a context of {context} needs at least "
            f"{round((context + 1) / TEST)}, because the last tenth is the test split"
        )
    alphabet, indices = np.unique(code_points, return_inverse=True)
    characters = torch.from_numpy(indices.astype(np.int32)).to(request.device)
    train, held = Windows(characters[:-test], context), Windows(characters[-test:], context)
    return Dataset(request.name, train, held, len(alphabet), (context,), "text")
