"""Flips, shifts and cutout of images that live on the device.

A flip or a shift with reflection only says which pixel each pixel comes from, so both together are
one gather: `rows` and `columns` hold the sources, example by example, and are drawn once an epoch.
A batch then costs one indexing kernel, without a loop over examples and without a host sync.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from neumann.lab.data.plan import Plan
from neumann.lab.data.source import on_device
from neumann.lab.errors import UsageError


@dataclass(frozen=True)
class Augmentation:
    """What is done to training images."""

    flip: bool = False  # left to right, every other time
    shift: int = 0  # up to this many pixels each way, the border filled by reflection
    cutout: int = 0  # side in pixels of the square set to the mean colour; 0 for none

    def check(self, height: int, width: int) -> None:
        """Raise UsageError where the images are too small for it."""
        side = min(height, width)
        if not 0 <= self.shift < side:
            raise UsageError(
                f"shift must be from 0 to {side - 1} for images of {height}x{width}, "
                f"got {self.shift}"
            )
        if not 0 <= self.cutout <= side:
            raise UsageError(
                f"cutout must be from 0 to {side} for images of {height}x{width}, got {self.cutout}"
            )


@dataclass(frozen=True)
class Draws:
    """The augmentation of an epoch's n examples, in the epoch's order, on the device."""

    rows: Tensor | None  # (n, height) int64, the row each row comes from; None: as they are
    columns: Tensor | None  # (n, width) int64
    centres: Tensor | None  # (n, 2) int64, row and column of the cutout; None: no cutout
    cutout: int  # pixels

    def gather(self, images: Tensor, chosen: Tensor, piece: slice) -> Tensor:
        """The augmented images (b, height, width, channels), not yet cut out.

        Args:
            images: all of them, (N, height, width, channels).
            chosen: which ones, (b,) int64.
            piece: their places in the epoch's order.
        """
        if self.rows is None or self.columns is None:
            return images.index_select(0, chosen)
        return images[
            chosen[:, None, None], self.rows[piece, :, None], self.columns[piece, None, :]
        ]

    def cut(self, images: Tensor, piece: slice) -> Tensor:
        """Normalised images (b, channels, height, width), in place: the mean colour is 0."""
        if self.centres is None:
            return images
        height, width = images.shape[2:]
        centres = self.centres[piece]
        down = _outside(torch.arange(height, device=images.device), centres[:, :1], self.cutout)
        across = _outside(torch.arange(width, device=images.device), centres[:, 1:], self.cutout)
        return images.mul_((down[:, :, None] | across[:, None, :]).unsqueeze(1))


def draw(
    how: Augmentation, plan: Plan, order: Tensor, size: tuple[int, int], device: torch.device
) -> Draws:
    """The augmentation of an epoch: for each example its own, drawn on the CPU.

    Each purpose has a generator of its own, so that asking for cutout does not change the shifts.
    Drawing on the CPU gives every device the same augmentation.

    Args:
        how: what to do.
        plan: says the seed and the epoch.
        order: the epoch's order (n,), on the CPU.
        size: height and width of the images.
        device: where the images live.
    """
    height, width = size
    examples = len(order)
    rows = columns = centres = None
    if how.flip or how.shift:
        shifts = torch.zeros(examples, 2, dtype=torch.int64)
        if how.shift:
            shifts = torch.randint(
                -how.shift, how.shift + 1, (examples, 2), generator=plan.generator("shift")
            )
        flips = torch.zeros(examples, dtype=torch.bool)
        if how.flip:
            flips = torch.rand(examples, generator=plan.generator("flip")) < 0.5
        shifts, flips = (on_device(t[order], device) for t in (shifts, flips))
        rows = _reflected(torch.arange(height, device=device) + shifts[:, :1], height)
        columns = _reflected(torch.arange(width, device=device) + shifts[:, 1:], width)
        columns = torch.where(flips[:, None], width - 1 - columns, columns)
    if how.cutout:
        generator = plan.generator("cutout")
        places = [torch.randint(side, (examples,), generator=generator) for side in size]
        centres = on_device(torch.stack(places, dim=1)[order], device)
    return Draws(rows, columns, centres, how.cutout)


def _reflected(place: Tensor, side: int) -> Tensor:
    """Places beyond an edge, at most side − 1 beyond, mirrored at it."""
    last = side - 1
    return last - (last - place.abs()).abs()


def _outside(places: Tensor, centres: Tensor, cutout: int) -> Tensor:
    """Whether each place (side,) is outside the interval around each centre (b, 1): (b, side)."""
    begin = centres - cutout // 2
    return (places < begin) | (places >= begin + cutout)
