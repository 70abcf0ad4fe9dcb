"""One image file to one image as the model sees it, still as bytes.

For training the Inception augmentation: a crop of 8 to 100 % of the area and of aspect 3/4 to 4/3,
a flip, and a jitter of brightness, contrast, saturation and hue. For evaluation a single crop from
the centre, of 87.5 % of the shorter side. torchvision draws from torch's global generator, which is
seeded for each example and then put back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from neumann.lab.data.plan import key
from neumann.lab.errors import shorten

CROP = 0.875  # of the shorter side, in evaluation


@dataclass(frozen=True)
class Decoder:
    """Reads and transforms files. It travels to workers, so it holds no more than it says."""

    image_size: int  # pixels
    seed: int
    epoch: int
    train: bool  # augment

    def __call__(self, path: str, index: int) -> Tensor | str:
        """The image (3, image_size, image_size) uint8; or, where there is none, what is wrong."""
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        # SyntaxError is what Pillow raises for a broken PNG.
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            return f"{path} cannot be read as an image: {shorten(error)}"
        with _seeded(key("image", self.seed, self.epoch, index)):
            transformed: Tensor = self._transform(image)
        return transformed

    @cached_property
    def _transform(self) -> Any:
        size = self.image_size
        if not self.train:
            steps = [v2.Resize(round(size / CROP)), v2.CenterCrop(size)]
        else:
            steps = [
                v2.RandomResizedCrop(size, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3)),
                v2.RandomHorizontalFlip(),
                v2.ColorJitter(brightness=32 / 255, contrast=0.5, saturation=0.5, hue=0.2),
            ]
        return v2.Compose([*steps, v2.PILToTensor()])


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """torch's CPU generator, seeded for a moment; torch.manual_seed would seed the GPU's too."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
