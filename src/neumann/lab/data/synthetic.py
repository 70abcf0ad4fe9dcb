"""Random examples with random labels, for speed tests: `synthetic:SHAPE,CLASSES,N`.

SHAPE is `64` for vectors or `3x32x32` (channels, height, width) for images. A tenth of N comes on
top as the test split. The examples are the same every time.
"""

import re
from collections.abc import Callable

import torch

from neumann.lab.data.arrays import Split
from neumann.lab.data.augmentation import Augmentation
from neumann.lab.data.plan import key
from neumann.lab.data.small import dataset
from neumann.lab.data.source import Dataset
from neumann.lab.errors import UsageError

_FORM = re.compile(r"([0-9]+|[0-9]+x[0-9]+x[0-9]+),([0-9]+),([0-9]+)")


def synthetic(
    name: str,
    described: str,
    choose: Callable[[Augmentation], Augmentation],
    device: torch.device,
    channels_last: bool,
) -> Dataset:
    """The set that `described`, the part of the name after the colon, asks for.

    Args:
        name: the whole of it.
        described: SHAPE,CLASSES,N.
        choose: from the augmentation that is usual, the one to use.
        device: where the set lives.
        channels_last: the memory format of images.
    """
    match = _FORM.fullmatch(described)
    if match is None:
        raise UsageError(
            f"{name!r} should look like synthetic:SHAPE,CLASSES,N, "
            "for example synthetic:3x32x32,10,4096 or synthetic:64,10,1000"
        )
    sides = tuple(int(side) for side in match[1].split("x"))
    classes, examples = int(match[2]), int(match[3])
    if 0 in (*sides, classes, examples):
        raise UsageError(f"{name!r} asks for nothing: every number must be at least 1")
    channels, height, width = sides if len(sides) == 3 else (1, 1, sides[0])
    generator = torch.Generator().manual_seed(key("synthetic"))
    splits = []
    for count in (examples, max(1, examples // 10)):
        shape = (count, height, width, channels)
        images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        labels = torch.randint(classes, (count,), generator=generator)
        splits.append(Split(images.numpy(), labels.numpy()))
    kind = "image" if len(sides) == 3 else "vector"
    # Images cost what CIFAR's cost, unless they are too small to be shifted.
    usual = Augmentation(flip=True, shift=4) if min(height, width) > 4 else Augmentation()
    augmentation = choose(usual)
    return dataset(name, splits[0], splits[1], classes, augmentation, device, kind, channels_last)
