"""Folders of images laid out like ImageNet: PATH/train/CLASS/*.jpeg and PATH/val/CLASS/*.jpeg.

The workers of a DataLoader decode and transform the images and send bytes; the device normalizes
them. Each epoch has a DataLoader with the exact list of its micro-batches, so no result depends on
the number of workers. Training images get the Inception augmentation (crop, flip, color jitter). An
image that cannot be read raises a UsageError when it is its turn. Needs torchvision and Pillow.
"""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.utils.data
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from neumann.lab.data.dataset import Dataset, MicroBatch, Request, split_indices
from neumann.lab.data.plan import Plan, derive_seed
from neumann.lab.errors import UsageError, shorten

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"})
CROP = 0.875  # of the shorter side, in evaluation
# The statistics of ImageNet that every recipe uses, in [0, 1].
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
SCALE = tuple(1 / (255 * std) for std in STD)  # normalized = byte · scale + offset
OFFSET = tuple(-mean / std for mean, std in zip(MEAN, STD, strict=True))

Decoded = Tensor | str  # an image (3, image_size, image_size) uint8, or what is wrong with it


def load_folder(request: Request) -> Dataset:
    request.refuse_augmentation()
    path = request.find_path("folder:PATH")
    size, workers = request.image_size, request.workers
    if workers is None:
        workers = min(8, count_cpus())
    if size < 1 or workers < 0:
        raise UsageError(
            f"image_size must be at least 1 and workers at least 0, got {size} and {workers}"
        )
    classes, *_ = in_train = scan_split(path / "train")
    in_val = scan_split(path / "val", classes)
    how = (size, request.device, workers, request.use_channels_last)
    train, test = (
        ImageFiles(tuple(paths), torch.tensor(labels), *how)
        for _, paths, labels in (in_train, in_val)
    )
    return Dataset(request.name, train, test, len(classes), (3, size, size), "image")


def scan_split(
    split: Path, classes: list[str] | None = None
) -> tuple[list[str], list[str], list[int]]:
    """List the classes of a split, which must be those given, and each image's file and label."""
    if not split.is_dir():
        raise UsageError(
            f"{split} was not found; an image folder holds train/CLASS/ and val/CLASS/ with images"
        )
    found = sorted(entry.name for entry in split.iterdir() if entry.is_dir())
    if not found:
        raise UsageError(f"{split} holds no class folders; there must be one per class")
    if classes is not None and found != classes:
        odd = sorted(set(found) ^ set(classes))[0]
        only = split if odd in found else split.parent / "train"
        raise UsageError(
            f"class folder {odd} is only in {only}; {split} must have the same classes as train"
        )
    paths, labels = [], []
    for label, name in enumerate(found):
        entries = (split / name).iterdir()
        files = sorted(str(path) for path in entries if path.suffix.lower() in SUFFIXES)
        if not files:
            raise UsageError(
                f"class folder {split / name} holds no images ({', '.join(sorted(SUFFIXES))})"
            )
        paths += files
        labels += [label] * len(files)
    return found, paths, labels


@dataclass(frozen=True)
class ImageFiles:
    """The image files of one split."""

    paths: tuple[str, ...]  # n files
    labels: Tensor  # (n,) int64, on the CPU
    image_size: int  # pixels, of the square that the model sees
    device: torch.device
    workers: int  # processes that decode; 0 decodes in this process
    channels_last: bool

    def __len__(self) -> int:
        return len(self.paths)

    def batches(self, plan: Plan) -> Iterator[list[MicroBatch]]:
        plan.count_batches(len(self))
        return self._batches(plan)

    def split(self, fraction: float, seed: int) -> tuple[Self, Self]:
        kept, held_out = (
            replace(
                self, paths=tuple(self.paths[i] for i in part.tolist()), labels=self.labels[part]
            )
            for part in split_indices(len(self), fraction, seed)
        )
        return kept, held_out

    def _batches(self, plan: Plan) -> Iterator[list[MicroBatch]]:
        order = plan.order(len(self))
        batches = list(plan.slices(len(self)))
        loaded: Iterator[Any] = iter(
            DataLoader(
                _DecodedImages(self.paths, self.image_size, plan),
                batch_sampler=[order[piece].tolist() for batch in batches for piece in batch],
                collate_fn=partial(_stack, labels=self.labels),
                num_workers=self.workers,
                pin_memory=self.device.type == "cuda",
                worker_init_fn=_leave_signals_to_the_parent,
                # Otherwise the DataLoader draws from the global generator and changes what follows.
                generator=torch.Generator().manual_seed(0),
            )
        )
        scale, offset = (torch.tensor(c, device=self.device).view(3, 1, 1) for c in (SCALE, OFFSET))
        try:
            for batch in batches:
                yield [self._to_device(next(loaded), scale, offset) for _ in batch]
        finally:
            # A traceback would keep this frame, and with it the iterator, alive. Workers that only
            # the garbage collector stops take seconds to end.
            del loaded

    def _to_device(
        self, loaded: str | tuple[Tensor, Tensor], scale: Tensor, offset: Tensor
    ) -> MicroBatch:
        """Copy a micro-batch to the device and normalize it there."""
        if isinstance(loaded, str):
            raise UsageError(loaded)
        images, labels = (tensor.to(self.device, non_blocking=True) for tensor in loaded)
        form = torch.channels_last if self.channels_last else torch.contiguous_format
        return images.contiguous(memory_format=form).float().mul_(scale).add_(offset), labels


@dataclass(frozen=True)
class _DecodedImages(torch.utils.data.Dataset[tuple[int, Decoded]]):
    """What a worker reads: the index of an example and its image."""

    paths: tuple[str, ...]
    image_size: int  # pixels
    plan: Plan

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[int, Decoded]:
        path = self.paths[index]
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        # Pillow raises SyntaxError for a broken PNG.
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            return index, f"{path} cannot be read as an image: {shorten(error)}"
        # torchvision draws from the global CPU generator. torch.manual_seed would seed the GPU too.
        with torch.random.fork_rng(devices=[]):
            seed = derive_seed("image", self.plan.seed, self.plan.epoch, index)
            torch.default_generator.manual_seed(seed)
            return index, self._transform(image)

    @cached_property
    def _transform(self) -> Any:
        size = self.image_size
        if not self.plan.train:
            steps = [v2.Resize(round(size / CROP)), v2.CenterCrop(size)]
        else:
            steps = [
                v2.RandomResizedCrop(size, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3)),
                v2.RandomHorizontalFlip(),
                v2.ColorJitter(brightness=32 / 255, contrast=0.5, saturation=0.5, hue=0.2),
            ]
        return v2.Compose([*steps, v2.PILToTensor()])


def _stack(examples: list[tuple[int, Decoded]], labels: Tensor) -> str | tuple[Tensor, Tensor]:
    """Stack a micro-batch, or return its first error: raised here, it would be a traceback."""
    for _, image in examples:
        if isinstance(image, str):
            return image
    indices, images = zip(*examples, strict=True)
    return torch.stack(images), labels[list(indices)]


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ignore Ctrl-C, which reaches the workers too: the parent still wants their current batch.

    SIGTERM must end a worker, so it gets its default action back instead of an inherited handler.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def count_cpus() -> int:
    """The CPUs that this process may use, or all of them on systems that do not say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
