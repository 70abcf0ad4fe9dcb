"""A text file, read as characters.

The last tenth is the test split. An example is a window of `context` characters and, as its labels,
the characters that follow each of them. Test windows lie end to end; so do training windows, but
from an offset that depends on the seed and the epoch, so that each character gets every place in a
window over the epochs. The last training window is moved back where it would reach over the end.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from neumann.lab.data.plan import Plan
from neumann.lab.data.source import Dataset, Piece, on_device
from neumann.lab.errors import UsageError

TEST = 0.1  # of the characters


@dataclass(frozen=True)
class Windows:
    """A stretch of text on the device."""

    characters: Tensor  # (length,) int32, places in the alphabet
    context: int  # characters

    def __len__(self) -> int:
        return max(0, len(self.characters) - 1) // self.context

    def batches(self, plan: Plan) -> Iterator[list[Piece]]:
        plan.batches_of(len(self))
        return self._batches(plan)

    def split(self, fraction: float, seed: int) -> tuple[Self, Self]:
        """The beginning and the end; the seed changes nothing."""
        held = round(len(self.characters) * fraction)
        kept, end = self.characters[:-held], self.characters[-held:]
        if min(len(kept), len(end)) <= self.context:
            raise UsageError(
                f"holding out {fraction} of {len(self.characters)} characters leaves less than a "
                f"window of {self.context} and the character after it"
            )
        return replace(self, characters=kept), replace(self, characters=end)

    def _batches(self, plan: Plan) -> Iterator[list[Piece]]:
        device = self.characters.device
        starts = plan.order(len(self)) * self.context
        if plan.train:
            generator = plan.generator("offset")
            offset = int(torch.randint(self.context, (), generator=generator))
            latest = len(self.characters) - 1 - self.context
            starts = (starts + offset).clamp_(max=latest)
        starts = on_device(starts, device)
        within = torch.arange(self.context + 1, device=device)
        for pieces in plan.spans(len(self)):
            windows = [self.characters[starts[piece, None] + within].long() for piece in pieces]
            yield [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows]


def text(name: str, path: Path, context: int, device: torch.device) -> Dataset:
    """The file as a data set whose classes are the characters in it."""
    if context < 1:
        raise UsageError(f"context must be at least 1 character, got {context}")
    try:
        content = path.read_bytes().decode()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a text in UTF-8: {error}") from error
    points = np.frombuffer(content.encode("utf-32-le"), dtype=np.uint32)
    test = round(len(points) * TEST)
    if test <= context:
        raise UsageError(
            f"{path} has {len(points)} characters; a context of {context} needs at least "
            f"{round((context + 1) / TEST)}, as the last tenth is the test split"
        )
    alphabet, places = np.unique(points, return_inverse=True)
    characters = torch.from_numpy(places.astype(np.int32)).to(device)
    train, last = Windows(characters[:-test], context), Windows(characters[-test:], context)
    return Dataset(name, train, last, len(alphabet), (context,), "text")
