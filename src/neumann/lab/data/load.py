"""Data sets by name."""

import os
from functools import partial
from pathlib import Path

import torch

from neumann.lab.data.augmentation import Augmentation
from neumann.lab.data.files import find
from neumann.lab.data.small import SETS, digits, torchvision_set
from neumann.lab.data.source import Dataset
from neumann.lab.data.synthetic import synthetic
from neumann.lab.data.text import text
from neumann.lab.errors import UsageError, missing_package, unknown

NAMES = ("digits", *SETS)
FORMS = ("text:FILE", "folder:PATH", "synthetic:SHAPE,CLASSES,N")
CPU = torch.device("cpu")


def load(
    name: str,
    *,
    data_dir: Path | None = None,
    download: bool = False,
    device: torch.device = CPU,
    flip: bool | None = None,
    shift: int | None = None,
    cutout: int | None = None,
    context: int = 128,
    image_size: int = 224,
    workers: int | None = None,
    channels_last: bool | None = None,
) -> Dataset:
    """The data set of this name, ready to give batches on the device.

    Args:
        name: digits, fashion-mnist, cifar10, cifar100, text:FILE, folder:PATH or
            synthetic:SHAPE,CLASSES,N.
        data_dir: the folder with the files of the named sets; None is `data`.
        download: fetch the files of a named set that is not there.
        device: where batches are wanted; small sets live there whole.
        flip, shift, cutout: as in Augmentation; None takes what is usual for the set.
        context: characters of a window of text.
        image_size: pixels of the square that images of a folder are brought to.
        workers: processes that decode the images of a folder; None takes one a CPU, at most 8.
        channels_last: the memory format of images; None takes it on CUDA.

    Raises UsageError for a name, a file or an option that cannot be used.
    """
    form, colon, rest = name.partition(":")
    last = device.type == "cuda" if channels_last is None else channels_last
    choose = partial(_chosen, flip=flip, shift=shift, cutout=cutout)
    if name == "digits":
        return digits(choose(Augmentation()), device)
    if name in SETS:
        augmentation = choose(SETS[name].augmentation)
        return torchvision_set(name, augmentation, device, data_dir, download, last)
    if colon and form == "synthetic":
        return synthetic(name, rest, choose, device, last)
    if colon and form in ("text", "folder"):
        if flip or shift or cutout:
            raise UsageError(f"flip, shift and cutout are for small sets of images, not for {name}")
        path = find(rest, data_dir, "text:FILE" if form == "text" else "folder:PATH")
        if form == "text":
            return text(name, path, context, device)
        processes = min(8, available_cpus()) if workers is None else workers
        return _folder(name, path, image_size, device, processes, last)
    raise unknown("data set", name, [*NAMES, *FORMS])


def _chosen(
    usual: Augmentation, flip: bool | None, shift: int | None, cutout: int | None
) -> Augmentation:
    """What is usual, but for what was asked for."""
    return Augmentation(
        usual.flip if flip is None else flip,
        usual.shift if shift is None else shift,
        usual.cutout if cutout is None else cutout,
    )


def _folder(
    name: str, path: Path, image_size: int, device: torch.device, workers: int, last: bool
) -> Dataset:
    try:
        from neumann.lab.data.folder import folder
    except ImportError as error:
        raise missing_package("torchvision", "lab", f"data set {name}") from error
    return folder(name, path, image_size, device, workers, last)


def available_cpus() -> int:
    """CPUs this process may use; on systems that do not say, those there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
