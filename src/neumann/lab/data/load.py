"""The table of data sets, and `load`, which looks a name up in it.

To add a data set, write a loader (a function from a `Request` to a `Dataset`) and add a line to
DATASETS. For a data set of torchvision, `TorchvisionSet` is the loader, so the line is enough.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from neumann.lab.data.augmentation import Augmentation
from neumann.lab.data.dataset import Dataset, Request, is_text
from neumann.lab.data.image_sets import TorchvisionSet, load_digits, load_synthetic
from neumann.lab.data.text import load_text
from neumann.lab.data.token_cache import hash_files
from neumann.lab.errors import UsageError, missing_package, unknown


def _load_folder(request: Request) -> Dataset:
    """Import the loader of image folders only when one is asked for: it needs torchvision."""
    try:
        from neumann.lab.data.image_folder import load_folder
    except ImportError as error:
        raise missing_package("torchvision", "lab", f"data set {request.name}") from error
    return load_folder(request)


DEFAULT_TOKENS = Request("").tokens
_FASHION_FILES = [
    f"FashionMNIST/raw/{part}-{what}-ubyte"
    for part in ("train", "t10k")
    for what in ("images-idx3", "labels-idx1")
]
_CIFAR10_FILES = [
    f"cifar-10-batches-py/{file}"
    for file in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch", "batches.meta")
]
_CIFAR100_FILES = [f"cifar-100-python/{file}" for file in ("train", "test", "meta")]
_SHIFT, _FLIP_AND_SHIFT = Augmentation(shift=4), Augmentation(flip=True, shift=4)

# A name, or a form with a colon: what the user writes after it is for the loader to read.
DATASETS: dict[str, Callable[[Request], Dataset]] = {
    "digits": load_digits,
    "fashion-mnist": TorchvisionSet("FashionMNIST", 10, _SHIFT, _FASHION_FILES),
    "cifar10": TorchvisionSet("CIFAR10", 10, _FLIP_AND_SHIFT, _CIFAR10_FILES),
    "cifar100": TorchvisionSet("CIFAR100", 100, _FLIP_AND_SHIFT, _CIFAR100_FILES),
    "text:FILE[,FILE…]": load_text,
    "folder:PATH": _load_folder,
    "synthetic:SHAPE,CLASSES,N": load_synthetic,
}


def hash_data(name: str, data_dir: Path | None) -> str | None:
    """A hash of the files of a text, as they are stored; None for other data."""
    if not is_text(name):
        return None
    return hash_files(Request(name, data_dir=data_dir).find_paths("text:FILE"))


def load(name: str, **options: Any) -> Dataset:
    """Load a data set by name, ready to give batches on the device; see Request for the options.

    Raises:
        UsageError: an unknown name, a file that cannot be used, an option that does not fit.
    """
    prefix, colon, _ = name.partition(":")
    for known, loader in DATASETS.items():
        if known == name or (colon and known.startswith(f"{prefix}:")):
            request = Request(name, **options)
            if request.tokens != DEFAULT_TOKENS and loader is not load_text:
                raise UsageError(f"--tokens {request.tokens} is for text, not for {name}")
            return loader(request)
    if Path(name).is_file():
        raise UsageError(f"unknown data set {name!r}; a text file is named text:{name}")
    raise unknown("data set", name, DATASETS)
