"""Loaders of small image sets: scikit-learn's digits, torchvision's sets, and synthetic images.

A torchvision set is read from the data folder: from `NAME.npz` if it is there, otherwise from the
files that torchvision downloads and checks before it unpickles them. An `.npz` file has x_train
(n, height, width[, channels]) uint8, y_train (n[, 1]) integers from 0, x_test and y_test; nothing
in it is unpickled. Unusable files raise a UsageError. Nothing is downloaded unless asked for.
"""

import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile
from zlib import error as ZlibError

import numpy as np
import torch
from numpy.typing import NDArray

from neumann.lab.data.augmentation import Augmentation
from neumann.lab.data.dataset import Dataset, Kind, Request
from neumann.lab.data.device_images import DeviceImages, compute_normalization
from neumann.lab.data.plan import derive_seed
from neumann.lab.errors import UsageError, missing_package, shorten

DIGITS_TEST = 360  # images; the other 1,437 are for training
# What torchvision raises for damaged files, a wrong checksum, and a download without a network.
_TORCHVISION_ERRORS = (AssertionError, EOFError, LookupError, OSError, RuntimeError, ValueError)
# NumPy raises OSError for a file that is not a zip archive, or ValueError if it might be a pickle.
# For a bare .npy file it returns an array, which is not a context manager: TypeError.
_NPZ_ERRORS = (OSError, ValueError, EOFError, BadZipFile, ZlibError, TypeError)
_SYNTHETIC = re.compile(r"([0-9]+|[0-9]+x[0-9]+x[0-9]+),([0-9]+),([0-9]+)")

Array = NDArray[np.generic]
Split = tuple[Array, Array]  # images (n, height, width, channels) uint8, and labels (n,) int64


def load_digits(request: Request) -> Dataset:
    """Load scikit-learn's 1,797 digits as vectors (64,), with the same split every time."""
    try:
        from sklearn.datasets import load_digits as read_digits
    except ImportError as error:
        raise missing_package("scikit-learn", "lab", "data set digits") from error
    pixels, labels = read_digits(return_X_y=True)
    images = pixels.astype(np.uint8).reshape(-1, 8, 8, 1)  # integers from 0 to 16
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).numpy()
    train, test = (
        check_split(images[part], labels[part], 10, "digits")
        for part in (order[DIGITS_TEST:], order[:DIGITS_TEST])
    )
    return make_image_dataset(request, train, test, 10, Augmentation(), kind="vector")


def load_synthetic(request: Request) -> Dataset:
    """Make random examples with random labels, for speed tests: `synthetic:SHAPE,CLASSES,N`.

    SHAPE is `64` for vectors or `3x32x32` (channels, height, width) for images. There are N
    training examples and a tenth of N for testing, the same every time.
    """
    match = _SYNTHETIC.fullmatch(request.argument)
    if match is None:
        raise UsageError(
            f"{request.name!r} should look like synthetic:SHAPE,CLASSES,N, "
            "for example synthetic:3x32x32,10,4096 or synthetic:64,10,1000"
        )
    sides = tuple(int(side) for side in match[1].split("x"))
    classes, examples = int(match[2]), int(match[3])
    if 0 in (*sides, classes, examples):
        raise UsageError(f"{request.name!r} is empty: every number must be at least 1")
    channels, height, width = sides if len(sides) == 3 else (1, 1, sides[0])
    generator = torch.Generator().manual_seed(derive_seed("synthetic"))

    def draw(count: int) -> Split:
        shape = (count, height, width, channels)
        images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        return images.numpy(), torch.randint(classes, (count,), generator=generator).numpy()

    train, test = draw(examples), draw(max(1, examples // 10))
    # The augmentation of CIFAR, so that a step costs the same, unless the images are too small.
    large_enough = min(height, width) > 4
    augmentation = Augmentation(flip=True, shift=4) if large_enough else Augmentation()
    kind: Kind = "image" if len(sides) == 3 else "vector"
    return make_image_dataset(request, train, test, classes, augmentation, kind)


@dataclass(frozen=True)
class TorchvisionSet:
    """The loader of a data set that torchvision knows."""

    torchvision_class: str  # in torchvision.datasets
    classes: int
    augmentation: Augmentation  # the default
    files: Sequence[str]  # that torchvision reads, below the data folder

    def __call__(self, request: Request) -> Dataset:
        folder = request.folder
        archive = folder if folder.suffix == ".npz" else folder / f"{request.name}.npz"
        if archive.is_file():
            train, test = read_npz(archive, self.classes)
        else:
            train, test = self._read_torchvision(request, archive)
        return make_image_dataset(request, train, test, self.classes, self.augmentation)

    def _read_torchvision(self, request: Request, archive: Path) -> list[Split]:
        name, folder = request.name, request.folder
        missing = [file for file in self.files if not (folder / file).is_file()]
        if missing and not request.download:
            raise UsageError(
                f"{name} was not found: looked for {archive} and for torchvision's "
                f"{folder / missing[0]}; --data-dir names the folder that holds one of them, "
                "--download fetches it there"
            )
        try:
            from torchvision import datasets
        except ImportError as error:
            raise missing_package("torchvision", "lab", f"data set {name}") from error
        read = getattr(datasets, self.torchvision_class)
        try:
            found = [
                read(folder, train=train, download=request.download) for train in (True, False)
            ]
        except (*_TORCHVISION_ERRORS, pickle.UnpicklingError) as error:
            message = (
                f"{name} could not be downloaded to {folder}: {shorten(error)}"
                if missing
                else f"the files of {name} in {folder} are damaged or not torchvision's "
                f"({shorten(error)}); remove them and use --download to fetch them again"
            )
            raise UsageError(message) from error
        return [
            check_split(
                np.asarray(split.data), np.asarray(split.targets), self.classes, str(folder)
            )
            for split in found
        ]


def read_npz(path: Path, classes: int) -> list[Split]:
    """Read the training and the test split from an `.npz` file with labels below `classes`."""
    names = ("x_train", "y_train", "x_test", "y_test")
    try:
        # We open the file because NumPy would leave one that it cannot read open.
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            missing = [name for name in names if name not in file]
            found = {name: file[name] for name in names if name in file}
    except _NPZ_ERRORS as error:
        raise UsageError(f"{path} is not a readable .npz file: {shorten(error)}") from error
    if missing:
        raise UsageError(
            f"{path} has no array {', '.join(missing)}; it must hold {', '.join(names)}"
        )
    train, test = (
        check_split(found[f"x_{part}"], found[f"y_{part}"], classes, f"{path}, {part}")
        for part in ("train", "test")
    )
    if train[0].shape[1:] != test[0].shape[1:]:
        raise UsageError(
            f"{path}: training images are {train[0].shape[1:]}, "
            f"test images {test[0].shape[1:]}; they must have the same shape"
        )
    return [train, test]


def check_split(images: Array, labels: Array, classes: int, where: str) -> Split:
    """Check images (n, height, width[, channels]) and labels (n[, 1]) and bring them into shape."""
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or 0 in images.shape:
        raise UsageError(
            f"{where}: images must be uint8 of shape (n, height, width[, channels]), "
            f"got {images.dtype} of {images.shape}"
        )
    if not np.issubdtype(labels.dtype, np.integer) or labels.size != len(images):
        raise UsageError(
            f"{where}: labels must be {len(images)} integers, one per image, "
            f"got {labels.dtype} of {labels.shape}"
        )
    numbers = labels.reshape(-1).astype(np.int64)
    low, high = numbers.min(), numbers.max()
    if low < 0 or high >= classes:
        raise UsageError(f"{where}: labels must be from 0 to {classes - 1}, got {low} to {high}")
    return images.reshape(*images.shape[:3], -1), numbers


def make_image_dataset(
    request: Request,
    train: Split,
    test: Split,
    classes: int,
    augmentation: Augmentation,
    kind: Kind = "image",
) -> Dataset:
    """Copy both splits to the device, with the normalization of the training images.

    The request may override the augmentation. The kind "vector" gives images as flat vectors.
    """
    chosen = {"flip": request.flip, "shift": request.shift, "cutout": request.cutout}
    given: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    augmentation = replace(augmentation, **given)
    _, height, width, channels = train[0].shape
    augmentation.check(height, width)
    # Arrays from files may be read-only. torch would warn, but we never write to them.
    splits = [
        (
            torch.from_numpy(np.require(images, requirements=["C", "W"])).to(request.device),
            torch.tensor(labels, device=request.device),
        )
        for images, labels in (train, test)
    ]
    normalization = compute_normalization(splits[0][0])
    flat, channels_last = kind == "vector", request.use_channels_last
    sources = [
        DeviceImages(images, labels, normalization, augmentation, flat, channels_last)
        for images, labels in splits
    ]
    shape = (height * width * channels,) if flat else (channels, height, width)
    return Dataset(request.name, sources[0], sources[1], classes, shape, kind)
