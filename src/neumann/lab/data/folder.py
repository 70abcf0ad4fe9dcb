"""Folders of images in the layout of ImageNet: PATH/train/CLASS/*.jpeg, PATH/val/CLASS/*.jpeg.

`scan` lists the files; `Images` gives batches through a DataLoader whose workers decode and
transform. A DataLoader is made for each epoch with the micro-batches it has to give, so that
nothing depends on the number of workers. Workers send bytes; the device normalises. An image that
cannot be read is found when its turn comes and is a UsageError that names it.
"""

import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as Examples

from neumann.lab.data.decoding import Decoder
from neumann.lab.data.plan import Plan
from neumann.lab.data.source import Dataset, Piece, split_indices
from neumann.lab.errors import UsageError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"})
# Of ImageNet, the numbers every recipe uses; in [0, 1].
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
SCALE = tuple(1 / (255 * std) for std in STD)  # bytes times this, plus the offset
OFFSET = tuple(-mean / std for mean, std in zip(MEAN, STD, strict=True))


@dataclass(frozen=True)
class Images:
    """The image files of one split."""

    paths: tuple[str, ...]  # n files
    labels: Tensor  # (n,) int64, on the CPU
    image_size: int  # pixels, of the square the model sees
    device: torch.device
    workers: int  # processes that decode; 0 decodes in this one
    channels_last: bool

    def __len__(self) -> int:
        return len(self.paths)

    def batches(self, plan: Plan) -> Iterator[list[Piece]]:
        plan.batches_of(len(self))
        return self._batches(plan)

    def split(self, fraction: float, seed: int) -> tuple[Self, Self]:
        kept, held = split_indices(len(self), fraction, seed)
        return self._only(kept), self._only(held)

    def _only(self, chosen: Tensor) -> Self:
        paths = tuple(self.paths[index] for index in chosen.tolist())
        return replace(self, paths=paths, labels=self.labels[chosen])

    def _batches(self, plan: Plan) -> Iterator[list[Piece]]:
        order = plan.order(len(self))
        spans = list(plan.spans(len(self)))
        pieces = iter(self._loader(plan, [order[piece] for batch in spans for piece in batch]))
        scale, offset = (torch.tensor(c, device=self.device).view(3, 1, 1) for c in (SCALE, OFFSET))
        form = torch.channels_last if self.channels_last else torch.contiguous_format
        try:
            for batch in spans:
                loaded = [self._on_device(next(pieces)) for _ in batch]
                yield [
                    (images.contiguous(memory_format=form).float().mul_(scale).add_(offset), labels)
                    for images, labels in loaded
                ]
        finally:
            # An exception keeps this frame, and workers that the garbage collector finds with it
            # take seconds to end.
            del pieces

    def _loader(self, plan: Plan, pieces: list[Tensor]) -> DataLoader[Any]:
        decoder = Decoder(self.image_size, plan.seed, plan.epoch, plan.train)
        return DataLoader(
            _Files(self.paths, decoder),
            batch_sampler=[piece.tolist() for piece in pieces],
            collate_fn=partial(_stack, labels=self.labels),
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_leave_signals_to_the_parent,
            # Its own, as a DataLoader would draw from the global one and shift what comes after.
            generator=torch.Generator().manual_seed(0),
        )

    def _on_device(self, loaded: str | tuple[Tensor, Tensor]) -> Piece:
        if isinstance(loaded, str):
            raise UsageError(loaded)
        images, labels = loaded
        return (
            images.to(self.device, non_blocking=True),
            labels.to(self.device, non_blocking=True),
        )


class _Files(Examples[tuple[int, "Tensor | str"]]):
    """What a worker does: an example's number, and its image (3, side, side) uint8 or an error."""

    def __init__(self, paths: tuple[str, ...], decoder: Decoder) -> None:
        self.paths = paths
        self.decoder = decoder

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[int, Tensor | str]:
        return index, self.decoder(self.paths[index], index)


def _stack(examples: list[tuple[int, Tensor | str]], labels: Tensor) -> str | tuple[Tensor, Tensor]:
    """A micro-batch, or the first error in it: raised here it would arrive as a traceback."""
    images = []
    for _, image in examples:
        if isinstance(image, str):
            return image
        images.append(image)
    return torch.stack(images), labels[[index for index, _ in examples]]


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ctrl-C reaches the workers too, but the parent still wants the batch they work on.

    They end when it tells them to, for which SIGTERM must not run a handler they inherited.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def scan(split: Path, classes: list[str] | None = None) -> tuple[list[str], list[str], list[int]]:
    """The classes below a split's folder, and for each image its file and its label.

    Args:
        split: the folder that holds one folder a class.
        classes: those there must be; None takes what there is.
    """
    if not split.is_dir():
        raise UsageError(
            f"{split} was not found; an image folder holds train/CLASS/ and val/CLASS/ with images"
        )
    found = sorted(entry.name for entry in split.iterdir() if entry.is_dir())
    if not found:
        raise UsageError(f"{split} holds no class folders; there must be one a class, with images")
    if classes is not None and found != classes:
        odd = sorted(set(found) ^ set(classes))[0]
        only = split if odd in found else split.parent / "train"
        raise UsageError(
            f"class folder {odd} is only in {only}; {split} must have the classes of train"
        )
    paths, labels = [], []
    for label, name in enumerate(found):
        files = sorted(
            str(path) for path in (split / name).iterdir() if path.suffix.lower() in SUFFIXES
        )
        if not files:
            raise UsageError(
                f"class folder {split / name} holds no images ({', '.join(sorted(SUFFIXES))})"
            )
        paths += files
        labels += [label] * len(files)
    return found, paths, labels


def folder(
    name: str,
    path: Path,
    image_size: int,
    device: torch.device,
    workers: int,
    channels_last: bool,
) -> Dataset:
    """The image folder as a data set."""
    if image_size < 1 or workers < 0:
        raise UsageError(
            f"image_size must be at least 1 and workers at least 0, got {image_size} and {workers}"
        )
    train = scan(path / "train")
    classes = train[0]
    val = scan(path / "val", classes)
    sources = [
        Images(tuple(paths), torch.tensor(labels), image_size, device, workers, channels_last)
        for _, paths, labels in (train, val)
    ]
    shape = (3, image_size, image_size)
    return Dataset(name, sources[0], sources[1], len(classes), shape, "image")
