"""A small set of images that lives on the device as a whole, as bytes: CIFAR takes 154 MB.

A batch is selected, augmented and normalized there, and the host only launches kernels.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from neumann.lab.data.augmentation import Augmentation, draw
from neumann.lab.data.dataset import MicroBatch, copy_to_device, split_indices
from neumann.lab.data.plan import Plan

CHUNK = 2048  # images summed at a time, which bounds the memory


@dataclass(frozen=True)
class Normalization:
    """x ↦ x · scale + offset, which gives each channel of the training set mean 0 and std 1."""

    scale: Tensor  # (channels, 1, 1) float32
    offset: Tensor  # (channels, 1, 1) float32


@dataclass(frozen=True)
class DeviceImages:
    """The examples of one split, on one device."""

    images: Tensor  # (n, height, width, channels) uint8
    labels: Tensor  # (n,) int64
    normalization: Normalization
    augmentation: Augmentation
    flat: bool = False  # give vectors (b, channels · height · width) instead of images
    channels_last: bool = False  # memory format of the images (b, c, h, w)

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, plan: Plan) -> Iterator[list[MicroBatch]]:
        plan.count_batches(len(self))
        return self._augmented(plan) if plan.train else self._plain(plan)

    def split(self, fraction: float, seed: int) -> tuple[Self, Self]:
        parts = (part.to(self.labels.device) for part in split_indices(len(self), fraction, seed))
        kept, held_out = (
            replace(self, images=self.images[part], labels=self.labels[part]) for part in parts
        )
        return kept, held_out

    def _augmented(self, plan: Plan) -> Iterator[list[MicroBatch]]:
        order = plan.order(len(self))
        height, width = self.images.shape[1:3]
        draws = draw(self.augmentation, plan, order, (height, width), self.images.device)
        order = copy_to_device(order, self.images.device)

        def make(piece: slice) -> MicroBatch:
            chosen = order[piece]
            images = draws.cut(self._normalize(draws.gather(self.images, chosen, piece)), piece)
            return self._reshape(images), self.labels.index_select(0, chosen)

        for pieces in plan.slices(len(self)):
            yield [make(piece) for piece in pieces]

    def _plain(self, plan: Plan) -> Iterator[list[MicroBatch]]:
        for pieces in plan.slices(len(self)):
            yield [(self._reshape(self._normalize(self.images[p])), self.labels[p]) for p in pieces]

    def _normalize(self, images: Tensor) -> Tensor:
        """From (b, h, w, c) uint8 to (b, c, h, w) float32 in the right memory format."""
        images = images.permute(0, 3, 1, 2)
        if not (self.channels_last or self.flat):
            images = images.contiguous()
        return (images * self.normalization.scale).add_(self.normalization.offset)

    def _reshape(self, images: Tensor) -> Tensor:
        return images.flatten(1) if self.flat else images


def compute_normalization(images: Tensor) -> Normalization:
    """Compute it from the training images, with sums of integers: exact on every device."""
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
    std[std == 0] = 1  # a constant channel becomes 0 instead of NaN
    pair = (x.float().to(images.device).view(channels, 1, 1) for x in (1 / std, -mean / std))
    return Normalization(*pair)
