"""Flips, shifts and cutout of images that live on the device.

A flip or a shift with reflection only says which pixel each pixel is copied from, so both are one
gather. Its rows and columns are drawn once per epoch: a batch costs one kernel and no host sync.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from neumann.lab.data.dataset import copy_to_device
from neumann.lab.data.plan import Plan
from neumann.lab.errors import UsageError


@dataclass(frozen=True)
class Augmentation:
    """How training images are changed at random."""

    flip: bool = False  # mirror left to right with probability one half
    shift: int = 0  # move up to this many pixels each way; reflection fills the border
    cutout: int = 0  # side in pixels of a square set to the mean color; 0 for none

    def check(self, height: int, width: int) -> None:
        """Raise UsageError if the images are too small for it."""
        side = min(height, width)
        limits = {"shift": (self.shift, side - 1), "cutout": (self.cutout, side)}
        for name, (value, largest) in limits.items():
            if not 0 <= value <= largest:
                images = f"images of {height}x{width}"
                raise UsageError(f"{name} must be from 0 to {largest} for {images}, got {value}")


@dataclass(frozen=True)
class Draws:
    """The random choices for an epoch's n examples, in the epoch's order, on the device."""

    rows: Tensor | None  # (n, height) int64, the source of each row; None: no flip or shift
    columns: Tensor | None  # (n, width) int64
    centers: Tensor | None  # (n, 2) int64, row and column of the cutout; None: no cutout
    cutout: int  # pixels

    def gather(self, images: Tensor, chosen: Tensor, piece: slice) -> Tensor:
        """Select, flip and shift the `chosen` images, which are a `piece` of the epoch's order."""
        if self.rows is None or self.columns is None:
            return images.index_select(0, chosen)
        rows, columns = self.rows[piece, :, None], self.columns[piece, None, :]
        return images[chosen[:, None, None], rows, columns]

    def cut(self, images: Tensor, piece: slice) -> Tensor:
        """Set the squares of normalized images (b, channels, height, width) to 0, in place."""
        if self.centers is None:
            return images
        height, width = images.shape[2:]
        centers = self.centers[piece]
        rows = _outside(torch.arange(height, device=images.device), centers[:, :1], self.cutout)
        columns = _outside(torch.arange(width, device=images.device), centers[:, 1:], self.cutout)
        return images.mul_((rows[:, :, None] | columns[:, None, :]).unsqueeze(1))


def draw(
    how: Augmentation, plan: Plan, order: Tensor, size: tuple[int, int], device: torch.device
) -> Draws:
    """Draw the augmentation of every example of an epoch, the same on every device.

    Each purpose has its own generator, so asking for cutout does not change the shifts. All numbers
    are drawn on the CPU, in the order of the data set, and then put into the epoch's `order` (n,).
    """
    (height, width), examples = size, len(order)
    rows = columns = centers = None
    if how.flip or how.shift:
        shifts = torch.zeros(examples, 2, dtype=torch.int64)
        if how.shift:
            generator = plan.generator("shift")
            shifts = torch.randint(-how.shift, how.shift + 1, (examples, 2), generator=generator)
        flips = torch.zeros(examples, dtype=torch.bool)
        if how.flip:
            flips = torch.rand(examples, generator=plan.generator("flip")) < 0.5
        shifts, flips = (copy_to_device(t[order], device) for t in (shifts, flips))
        rows = _reflect(torch.arange(height, device=device) + shifts[:, :1], height)
        columns = _reflect(torch.arange(width, device=device) + shifts[:, 1:], width)
        columns = torch.where(flips[:, None], width - 1 - columns, columns)
    if how.cutout:
        generator = plan.generator("cutout")
        both = [torch.randint(side, (examples,), generator=generator) for side in size]
        centers = copy_to_device(torch.stack(both, dim=1)[order], device)
    return Draws(rows, columns, centers, how.cutout)


def _reflect(positions: Tensor, side: int) -> Tensor:
    """Mirror positions at the edge they lie beyond, by at most side − 1."""
    last = side - 1
    return last - (last - positions.abs()).abs()


def _outside(positions: Tensor, centers: Tensor, cutout: int) -> Tensor:
    """Whether each position (side,) is outside the interval around each center: (b, side)."""
    begin = centers - cutout // 2
    return (positions < begin) | (positions >= begin + cutout)
