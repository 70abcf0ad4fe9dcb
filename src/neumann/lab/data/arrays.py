"""Images and labels as arrays, and the `.npz` files that hold them.

Such a file has x_train (n, height, width[, channels]) and y_train (n[, 1]), x_test and y_test;
images are uint8, labels integers from 0. Nothing in it is unpickled. What does not fit is a
UsageError that names the file and the array.
"""

from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile
from zlib import error as ZlibError

import numpy as np
from numpy.typing import NDArray

from neumann.lab.errors import UsageError, shorten

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Split:
    """The images and labels of one split."""

    images: NDArray[np.uint8]  # (n, height, width, channels)
    labels: NDArray[np.int64]  # (n,)


def read_npz(path: Path, classes: int) -> tuple[Split, Split]:
    """The training and the test split of an `.npz` file whose labels are below `classes`."""
    names = ("x_train", "y_train", "x_test", "y_test")
    try:
        # Opened here, as NumPy leaves a file that it cannot read open.
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            missing = [name for name in names if name not in file]
            if missing:
                raise UsageError(
                    f"{path} has no array {', '.join(missing)}; it must hold {', '.join(names)}"
                )
            found = {name: file[name] for name in names}
    except UsageError:
        raise
    # A file that is no zip is an OSError or, if it could be a pickle, a ValueError; one that is
    # not an archive at all comes back as a bare array, which is no context manager.
    except (OSError, ValueError, EOFError, BadZipFile, ZlibError, TypeError) as error:
        raise UsageError(f"{path} is not a readable .npz file: {shorten(error)}") from error
    train, test = (
        split(found[f"x_{part}"], found[f"y_{part}"], classes, f"{path}, {part}")
        for part in ("train", "test")
    )
    if train.images.shape[1:] != test.images.shape[1:]:
        raise UsageError(
            f"{path}: training images are {train.images.shape[1:]}, "
            f"test images {test.images.shape[1:]}; they must be alike"
        )
    return train, test


def split(images: Array, labels: Array, classes: int, where: str) -> Split:
    """Images (n, height, width[, channels]) and labels (n[, 1]), checked; `where` names them."""
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or 0 in images.shape:
        raise UsageError(
            f"{where}: images must be uint8 of shape (n, height, width[, channels]), "
            f"got {images.dtype} of {images.shape}"
        )
    if not np.issubdtype(labels.dtype, np.integer) or labels.size != len(images):
        raise UsageError(
            f"{where}: labels must be {len(images)} integers, one an image, "
            f"got {labels.dtype} of {labels.shape}"
        )
    numbers = labels.reshape(-1).astype(np.int64)
    if numbers.min() < 0 or numbers.max() >= classes:
        raise UsageError(
            f"{where}: labels must be from 0 to {classes - 1}, "
            f"got {numbers.min()} to {numbers.max()}"
        )
    return Split(images.reshape(*images.shape[:3], -1).astype(np.uint8, copy=False), numbers)
