"""What a loader gets (`Request`) and what every data set looks like to the rest of the lab."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from neumann.lab.data.plan import Plan, derive_seed
from neumann.lab.errors import UsageError

Kind = Literal["vector", "image", "text"]
MicroBatch = tuple[Tensor, Tensor]  # inputs and labels, on the device
CPU = torch.device("cpu")


def is_text(name: str) -> bool:
    """Whether `--data` names a text."""
    return name.startswith("text:")


@dataclass(frozen=True)
class Request:
    """What the user asked for. A loader uses what makes sense for its data set."""

    name: str  # such as "cifar10" or "text:FILE"
    data_dir: Path | None = None  # the folder that holds the data sets; None is `data`
    download: bool = False  # fetch the files of a named data set if they are missing
    device: torch.device = CPU  # where the batches go; small data sets live there as a whole
    flip: bool | None = None  # this and the next two: see Augmentation; None is the default
    shift: int | None = None
    cutout: int | None = None
    context: int = 128  # characters, bytes or tokens in a window of text
    tokens: str = "chars"  # what a text is read as: chars, bytes or bpe:N
    image_size: int = 224  # pixels of the square that images of a folder are resized to
    workers: int | None = None  # processes that decode images; None is one per CPU, at most 8
    channels_last: bool | None = None  # memory format of images; None is channels_last on CUDA

    @property
    def folder(self) -> Path:
        return Path("data") if self.data_dir is None else self.data_dir

    @property
    def argument(self) -> str:
        """The part of the name after the colon."""
        return self.name.partition(":")[2]

    @property
    def use_channels_last(self) -> bool:
        return self.device.type == "cuda" if self.channels_last is None else self.channels_last

    def refuse_augmentation(self) -> None:
        if self.flip or self.shift or self.cutout:
            raise UsageError(
                f"flip, shift and cutout are for built-in sets of images, not for {self.name}"
            )

    def find_path(self, form: str) -> Path:
        """Find the file or folder after the colon, in the current directory or the data folder."""
        return self._find(self.argument, form)

    def find_paths(self, form: str) -> list[Path]:
        """Find the files after the colon, with commas between them."""
        names = self.argument.split(",")
        if len(names) > 1 and any(place.exists() for place in self._list_places(self.argument)):
            return [self.find_path(form)]  # the comma belongs to its name
        files = [self._find(name, form) for name in names]
        places = [file.resolve() for file in files]
        twice = next((f for f, p in zip(files, places, strict=True) if places.count(p) > 1), None)
        if twice is not None:
            raise UsageError(f"{self.name} names {twice} twice")
        return files

    def _find(self, name: str, form: str) -> Path:
        if not name:
            raise UsageError(
                f"--data {self.name}: a path after the colon or a comma is missing; it should look "
                f"like {form}"
            )
        places = self._list_places(name)
        for place in places:
            if place.exists():
                return place
        if len(places) == 1:
            raise UsageError(f"--data {self.name}: {places[0]} does not exist")
        looked = " and ".join(map(str, places))
        advice = "--data-dir names another folder to look in"
        raise UsageError(f"{name} was not found: looked for {looked}; {advice}")

    def _list_places(self, name: str) -> list[Path]:
        path = Path(name).expanduser()
        return [path] if path.is_absolute() else [path, self.folder / path]


class Source(Protocol):
    """The examples of one split."""

    def __len__(self) -> int: ...

    def batches(self, plan: Plan) -> Iterator[list[MicroBatch]]:
        """The batches of one epoch, each as a list of this rank's micro-batches.

        Training gives `len(self) // batch_size` batches. Evaluation gives every example exactly
        once over all ranks. A plan that does not fit raises UsageError in this call, not with the
        first batch.
        """

    def split(self, fraction: float, seed: int) -> tuple[Self, Self]:
        """Split off about this fraction of the examples: (the rest, the part split off)."""


@dataclass(frozen=True)
class Dataset:
    """A training split, a test split, and what a model has to know about them."""

    name: str  # as it was passed to `load`
    train: Source
    test: Source
    classes: int  # number of labels; for text the size of the alphabet
    shape: tuple[int, ...]  # of one input: (64,), (3, 32, 32), (context,)
    kind: Kind
    validation: Source | None = None  # a set of its own, if the data set has one
    # (classes,) bytes of UTF-8 that each token of a text stands for, on the device
    token_bytes: Tensor | None = None
    data_hash: str | None = None  # of the files of a text

    def hold_out(self, fraction: float = 0.1, seed: int = 0) -> "Dataset":
        """Replace the test split by a fixed part of the training split, which shrinks by it.

        A data set with a validation set takes that instead, and trains on as much as before. The
        part is random, except for text, where it is the end of the training text: windows from
        the middle would share characters with the training windows.
        """
        if not 0 < fraction < 1:
            raise UsageError(f"the held-out fraction must be between 0 and 1, got {fraction}")
        if self.validation is not None:
            return replace(self, test=self.validation)
        train, held_out = self.train.split(fraction, seed)
        return replace(self, train=train, test=held_out)


def split_indices(examples: int, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """The indices (n,) of the examples to keep and of those to hold out, each sorted."""
    held_out = round(examples * fraction)
    if not 0 < held_out < examples:
        raise UsageError(f"holding out {fraction} of {examples} examples leaves one part empty")
    generator = torch.Generator().manual_seed(derive_seed("held out", seed))
    order = torch.randperm(examples, generator=generator)
    return order[held_out:].sort().values, order[:held_out].sort().values


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device without making the host wait for a GPU."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
