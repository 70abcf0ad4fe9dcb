"""Small sets of images: digits, fashion-mnist, cifar10, cifar100.

digits comes with scikit-learn. The others are read from the data folder: `NAME.npz` (see
`arrays.py`), or else the files that torchvision downloads, which it checks before it unpickles.
Nothing is downloaded unless asked for.
"""

import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from neumann.lab.data.arrays import Split, read_npz, split
from neumann.lab.data.augmentation import Augmentation
from neumann.lab.data.files import folder_of
from neumann.lab.data.resident import Resident, normalisation
from neumann.lab.data.source import Dataset
from neumann.lab.errors import UsageError, missing_package, shorten

DIGITS_TEST = 360  # images; the other 1,437 are for training


@dataclass(frozen=True)
class Known:
    """A set that torchvision knows."""

    torchvision: str  # its class in torchvision.datasets
    files: tuple[str, ...]  # below the data folder, one of each split
    classes: int
    augmentation: Augmentation


_FASHION = tuple(
    f"FashionMNIST/raw/{part}-{what}-ubyte"
    for part in ("train", "t10k")
    for what in ("images-idx3", "labels-idx1")
)
_BATCHES = (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch", "batches.meta")
_CIFAR10 = tuple(f"cifar-10-batches-py/{file}" for file in _BATCHES)
_CIFAR100 = tuple(f"cifar-100-python/{file}" for file in ("train", "test", "meta"))

SETS = {
    "fashion-mnist": Known("FashionMNIST", _FASHION, 10, Augmentation(shift=4)),
    "cifar10": Known("CIFAR10", _CIFAR10, 10, Augmentation(flip=True, shift=4)),
    "cifar100": Known("CIFAR100", _CIFAR100, 100, Augmentation(flip=True, shift=4)),
}


def digits(augmentation: Augmentation, device: torch.device) -> Dataset:
    """scikit-learn's 1,797 digits as vectors (64,), the same split every time."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise missing_package("scikit-learn", "lab", "data set digits") from error
    found, labels = load_digits(return_X_y=True)
    images = found.astype(np.uint8).reshape(-1, 8, 8, 1)  # whole numbers from 0 to 16
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).numpy()
    train, test = (
        split(images[part], labels[part], 10, "digits")
        for part in (order[DIGITS_TEST:], order[:DIGITS_TEST])
    )
    return dataset("digits", train, test, 10, augmentation, device, kind="vector")


def torchvision_set(
    name: str,
    augmentation: Augmentation,
    device: torch.device,
    data_dir: Path | None,
    download: bool,
    channels_last: bool,
) -> Dataset:
    """One of SETS, from `.npz` or torchvision's files."""
    known = SETS[name]
    folder = folder_of(data_dir)
    archive = folder if folder.suffix == ".npz" else folder / f"{name}.npz"
    if archive.is_file():
        train, test = read_npz(archive, known.classes)
    else:
        train, test = _from_torchvision(name, known, folder, archive, download)
    return dataset(
        name, train, test, known.classes, augmentation, device, channels_last=channels_last
    )


def dataset(
    name: str,
    train: Split,
    test: Split,
    classes: int,
    augmentation: Augmentation,
    device: torch.device,
    kind: str = "image",
    channels_last: bool = False,
) -> Dataset:
    """Both splits on the device, normalised by the mean and std of the training images."""
    _, height, width, channels = train.images.shape
    augmentation.check(height, width)
    # Arrays from files may be read-only, which torch warns about; these are only ever read.
    images = [
        torch.from_numpy(np.require(s.images, requirements=["C", "W"])) for s in (train, test)
    ]
    images = [tensor.to(device) for tensor in images]
    labels = [torch.tensor(s.labels, device=device) for s in (train, test)]
    how = normalisation(images[0])
    flat = kind == "vector"
    sources = [
        Resident(x, y, how, augmentation, flat, channels_last)
        for x, y in zip(images, labels, strict=True)
    ]
    shape = (height * width * channels,) if flat else (channels, height, width)
    return Dataset(name, sources[0], sources[1], classes, shape, kind)


def _from_torchvision(
    name: str, known: Known, folder: Path, archive: Path, download: bool
) -> tuple[Split, Split]:
    absent = [file for file in known.files if not (folder / file).is_file()]
    if absent and not download:
        raise UsageError(
            f"{name} was not found: looked for {archive} and for torchvision's "
            f"{folder / absent[0]}; --data-dir names the folder that holds one of them, "
            "--download fetches it there"
        )
    try:
        from torchvision import datasets
    except ImportError as error:
        raise missing_package("torchvision", "lab", f"data set {name}") from error
    splits = []
    for train in (True, False):
        try:
            found = getattr(datasets, known.torchvision)(folder, train=train, download=download)
        # What damaged files, a wrong checksum and a download without a network raise.
        except (OSError, EOFError, RuntimeError, ValueError, AssertionError) as error:
            raise _unreadable(name, folder, absent, error) from error
        except (KeyError, IndexError, pickle.UnpicklingError) as error:
            raise _unreadable(name, folder, absent, error) from error
        images, labels = np.asarray(found.data), np.asarray(found.targets)
        where = f"{folder}, {'training' if train else 'test'} set of {name}"
        splits.append(split(images, labels, known.classes, where))
    return splits[0], splits[1]


def _unreadable(name: str, folder: Path, absent: list[str], error: Exception) -> UsageError:
    if absent:
        return UsageError(f"{name} could not be downloaded to {folder}: {shorten(error)}")
    return UsageError(
        f"the files of {name} in {folder} are damaged or not torchvision's ({shorten(error)}); "
        "remove them and give --download to fetch them again"
    )
