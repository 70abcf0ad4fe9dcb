"""A small set of images that lives on the device whole, as bytes.

A batch is gathered, augmented and normalised there; the host only launches kernels. CIFAR's 50,000
images are 154 MB. Memory that does not suffice is torch's own out-of-memory error.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from neumann.lab.data.augmentation import Augmentation, draw
from neumann.lab.data.plan import Plan
from neumann.lab.data.source import Piece, on_device, split_indices

CHUNK = 2048  # images at a time when sums are taken, which bounds the memory


@dataclass(frozen=True)
class Normalisation:
    """x ↦ x · scale + offset, which gives each channel of the training set mean 0 and std 1."""

    scale: Tensor  # (channels, 1, 1) float32
    offset: Tensor  # (channels, 1, 1) float32


@dataclass(frozen=True)
class Resident:
    """The examples of one split, on one device."""

    images: Tensor  # (n, height, width, channels) uint8
    labels: Tensor  # (n,) int64
    normalisation: Normalisation
    augmentation: Augmentation
    flat: bool = False  # give vectors (b, channels · height · width) instead of images
    channels_last: bool = False  # give images (b, c, h, w) in that memory format

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, plan: Plan) -> Iterator[list[Piece]]:
        plan.batches_of(len(self))
        return self._augmented(plan) if plan.train else self._plain(plan)

    def split(self, fraction: float, seed: int) -> tuple[Self, Self]:
        kept, held = split_indices(len(self), fraction, seed)
        return self._only(kept), self._only(held)

    def _augmented(self, plan: Plan) -> Iterator[list[Piece]]:
        device = self.images.device
        order = plan.order(len(self))
        height, width = self.images.shape[1:3]
        draws = draw(self.augmentation, plan, order, (height, width), device)
        order = on_device(order, device)
        for pieces in plan.spans(len(self)):
            batch = []
            for piece in pieces:
                chosen = order[piece]
                images = self._normalised(draws.gather(self.images, chosen, piece))
                labels = self.labels.index_select(0, chosen)
                batch.append((self._shaped(draws.cut(images, piece)), labels))
            yield batch

    def _plain(self, plan: Plan) -> Iterator[list[Piece]]:
        for pieces in plan.spans(len(self)):
            yield [
                (self._shaped(self._normalised(self.images[piece])), self.labels[piece])
                for piece in pieces
            ]

    def _normalised(self, images: Tensor) -> Tensor:
        """From (b, h, w, c) uint8 to (b, c, h, w) float32, in the memory format asked for."""
        images = images.permute(0, 3, 1, 2)
        if not (self.channels_last or self.flat):
            images = images.contiguous()
        return (images * self.normalisation.scale).add_(self.normalisation.offset)

    def _shaped(self, images: Tensor) -> Tensor:
        return images.flatten(1) if self.flat else images

    def _only(self, chosen: Tensor) -> Self:
        index = chosen.to(self.labels.device)
        return replace(self, images=self.images[index], labels=self.labels[index])


def normalisation(images: Tensor) -> Normalisation:
    """From the images (n, height, width, channels) uint8 of the training set.

    The sums are of integers and therefore exact: the same on every device.
    """
    channels = images.shape[3]
    total = torch.zeros(channels, dtype=torch.int64, device=images.device)
    squares = torch.zeros_like(total)
    for start in range(0, len(images), CHUNK):
        chunk = images[start : start + CHUNK]
        total += chunk.sum((0, 1, 2), dtype=torch.int64)
        squares += chunk.to(torch.int32).square_().sum((0, 1, 2), dtype=torch.int64)
    count = images.numel() // channels
    mean = total.double().cpu() / count
    std = (squares.double().cpu() / count - mean.square()).clamp_(min=0).sqrt_()
    std[std == 0] = 1  # a channel without contrast stays 0 instead of becoming NaN
    numbers = [n.float().to(images.device).view(channels, 1, 1) for n in (1 / std, -mean / std)]
    return Normalisation(numbers[0], numbers[1])
