"""Checkpoints of a run: one file a step, whole or not there.

A file is what torch.save makes of the payload, followed by a line with the step and the SHA-256 of
step and content; torch.load reads it as it is, too. File and checksum become visible by one rename,
so a process killed at any moment leaves the checkpoints it had. A file that was damaged later
(truncated, bits flipped) does not fit its checksum: `latest` reports it and takes the one before.

How it can fail: CheckpointError, in one line, where a file cannot be written (a full disk: the old
checkpoints stay) or read, or where every checkpoint is damaged; TypeError for a payload that
weights_only loading would refuse, before anything is written.
"""

import contextlib
import errno
import hashlib
import io
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neumann.lab.files import StorageError, reason, remove_leftovers, sync_folder, write_aside
from neumann.lab.generators import restore_rng, rng_state

__all__ = ["CheckpointError", "Checkpoints", "Loaded", "restore_rng", "rng_state"]

NAME = re.compile(r"checkpoint-(\d{12})\.pt")
SEAL = re.compile(rb"\nneumann checkpoint 1 step (\d{12}) sha256 ([0-9a-f]{64})\n")
SEAL_BYTES = len(b"\nneumann checkpoint 1 step 000000000000 sha256 \n") + 64
LAST_STEP = 10**12 - 1

TENSORS = (Tensor, nn.Parameter)
LEAVES = (int, float, bool, complex, str, bytes, type(None))
TORCH_LEAVES = (torch.Size, torch.dtype, torch.device)
SEQUENCES = (list, tuple, set)
MAPPINGS = (dict, OrderedDict, Counter)


class CheckpointError(StorageError):
    """A checkpoint cannot be written or read."""


class _DamagedError(Exception):
    """The file is not what was written."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read and fits its checksum."""

    step: int
    payload: dict[str, Any]  # as it was saved, all tensors on the CPU
    path: Path
    damaged: tuple[Path, ...] = ()  # newer ones that were passed over, the newest first


class Checkpoints:
    """The checkpoints in a folder, of which the `keep` with the highest steps stay.

    A folder belongs to one run, and a step is saved once by it. Several processes may save and
    load at the same time: each sees whole files.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, the number of checkpoints kept; got {keep}")
        self.folder = Path(folder)
        self.keep = keep

    def save(self, step: int, payload: dict[str, Any]) -> Path:
        """Write the checkpoint of a step, then remove all but the newest; returns its path.

        The payload may hold tensors and parameters (no subclasses: gather shards first), Python's
        numbers, strings, bytes and None, torch's sizes, dtypes and devices, in dicts, lists, tuples
        and sets: state dicts, and what `rng_state` returns. No arrays and scalars of NumPy.
        """
        if not 0 <= step <= LAST_STEP:
            raise ValueError(f"step must be from 0 to {LAST_STEP}; got {step}")
        _check(payload, "payload")
        path = self.folder / f"checkpoint-{step:012d}.pt"
        buffer = io.BytesIO()
        torch.save(payload, buffer)
        content = buffer.getbuffer()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.folder)
            write_aside(path, [content, _seal(step, content)])
        except OSError as error:
            raise CheckpointError(
                f"cannot save {path}: {reason(error)} (the checkpoints before it are untouched)"
            ) from error
        self._prune(step)
        return path

    def latest(self) -> Loaded | None:
        """The newest checkpoint that is whole; None if there is none at all.

        Damaged ones that are newer are named in the result; CheckpointError if all are damaged.
        """
        # Another process may save and prune between our look at the folder and at a file.
        for _ in range(100):
            damaged: list[Path] = []
            vanished = False
            for step, path in self._found():
                try:
                    content = _verified(step, path)
                except _DamagedError:
                    damaged.append(path)
                except FileNotFoundError:
                    vanished = True
                except OSError as error:
                    raise CheckpointError(f"cannot read {path}: {reason(error)}") from error
                else:
                    return Loaded(step, _unpack(path, content), path, tuple(damaged))
            if not vanished:
                break
        if damaged:
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged: "
                f"{', '.join(path.name for path in damaged)}; remove them to start from the "
                "beginning"
            )
        return None

    def at(self, step: int) -> Loaded | None:
        """The checkpoint of a step; None if there is none. CheckpointError if it is damaged."""
        path = dict(self._found()).get(step)
        if path is None:
            return None
        try:
            return Loaded(step, _unpack(path, _verified(step, path)), path)
        except _DamagedError as error:
            raise CheckpointError(f"{path} is damaged") from error
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {reason(error)}") from error

    def steps(self) -> list[int]:
        """Those that have a checkpoint, damaged ones too, in their order."""
        return sorted(step for step, _ in self._found())

    def clear(self) -> None:
        """Remove all checkpoints: for a run that starts again from the beginning."""
        try:
            # The oldest first: stopped half way, the newest is still the newest.
            for _, path in reversed(self._found()):
                path.unlink(missing_ok=True)
            if self.folder.is_dir():
                remove_leftovers(self.folder)
                sync_folder(self.folder)
        except OSError as error:
            raise CheckpointError(
                f"cannot remove the checkpoints in {self.folder}: {reason(error)}"
            ) from error

    def _found(self) -> list[tuple[int, Path]]:
        """Steps and paths, the newest first."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"cannot read {self.folder}: {reason(error)}") from error
        matches = filter(None, map(NAME.fullmatch, names))
        return sorted(((int(m[1]), self.folder / m[0]) for m in matches), reverse=True)

    def _prune(self, saved: int) -> None:
        """Remove what is no longer needed, after `saved` was written."""
        kept = 0
        for step, path in self._found():
            # A later one was passed over as damaged when the run resumed before it. If it counted
            # here, it would push out a whole one. (A whole one can only be of the same run.)
            whole = step <= saved or _is_whole(step, path)
            if whole and (kept < self.keep or step == saved):
                kept += 1
                continue
            # What cannot be removed now is tried again at the next save.
            with contextlib.suppress(OSError):
                path.unlink()


def _seal(step: int, content: memoryview) -> bytes:
    digest = hashlib.sha256(b"%012d" % step)
    digest.update(content)
    return b"\nneumann checkpoint 1 step %012d sha256 %s\n" % (step, digest.hexdigest().encode())


def _verified(step: int, path: Path) -> memoryview:
    """The content of a file, without its seal, if it fits it."""
    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        if error.errno == errno.EIO:
            raise _DamagedError from error
        raise
    content, seal = data[:-SEAL_BYTES], bytes(data[-SEAL_BYTES:])
    if SEAL.fullmatch(seal) is None or seal != _seal(step, content):
        raise _DamagedError
    return content


def _is_whole(step: int, path: Path) -> bool:
    try:
        _verified(step, path)
    except _DamagedError:
        return False
    except OSError:
        return True  # not ours to judge, so not ours to remove
    return True


def _unpack(path: Path, content: memoryview) -> dict[str, Any]:
    try:
        payload: dict[str, Any] = torch.load(
            io.BytesIO(content), map_location="cpu", weights_only=True
        )
    except Exception as error:
        # It is as it was written, so the one before would not do better.
        first = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"{path} is whole, but torch {torch.__version__} cannot load it: {first}"
        ) from error
    return payload


def _check(value: Any, where: str) -> None:
    """Refuse what torch.load(weights_only=True) would refuse, naming where it is."""
    kind = type(value)
    if kind in TENSORS or kind in LEAVES or kind in TORCH_LEAVES:
        return
    for child, place in _children(value, where):
        _check(child, place)


def _children(value: Any, where: str) -> Iterator[tuple[Any, str]]:
    kind = type(value)
    if kind in MAPPINGS:
        for key, child in value.items():
            yield key, f"the key {key!r} of {where}"
            yield child, f"{where}[{key!r}]"
    elif kind in SEQUENCES:
        items: Sequence[Any] = tuple(value)
        yield from ((child, f"{where}[{index}]") for index, child in enumerate(items))
    else:
        raise TypeError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds tensors and "
            "Python's own numbers, strings, lists, tuples and dicts only"
        )
