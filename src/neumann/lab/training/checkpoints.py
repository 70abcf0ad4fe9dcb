"""Checkpoints of a run: one file per saved step, either complete or absent.

A file is the output of torch.save, followed by a line with the step and the SHA-256 of step and
content; torch.load can read it too. A file that was damaged later does not match its checksum:
`load_latest` reports it and loads the one before. CheckpointError, in one line, if a file cannot be
written (then the old ones stay) or read, or if every checkpoint is damaged.
"""

import contextlib
import errno
import hashlib
import io
import os
import re
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neumann.lab.storage.atomic_files import (
    StorageError,
    describe_os_error,
    explain_os_errors,
    remove_leftovers,
    write_atomically,
)

NAME = re.compile(r"checkpoint-(\d{12})\.pt")
SEAL = b"\nneumann checkpoint 1 step %012d sha256 %s\n"
SEAL_BYTES = len(SEAL % (0, bytes(64)))
LAST_STEP = 10**12 - 1
TORCH_LEAVES = (Tensor, nn.Parameter, torch.Size, torch.dtype, torch.device)
LEAVES = (int, float, bool, complex, str, bytes, type(None), *TORCH_LEAVES)


class CheckpointError(StorageError):
    """A checkpoint cannot be written or read."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that matched its checksum."""

    step: int
    payload: dict[str, Any]  # as saved, with all tensors on the CPU
    path: Path
    damaged: tuple[Path, ...] = ()  # newer ones that were skipped, the newest first


class Checkpoints:
    """The checkpoints in the folder of one run, of which the `keep` newest stay.

    Several processes may save and load at the same time: each sees complete files.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, the number of checkpoints kept; got {keep}")
        self.folder = Path(folder)
        self.keep = keep

    def save(self, step: int, payload: dict[str, Any]) -> Path:
        """Write the checkpoint of a step, remove all but the newest, and return its path.

        The payload may hold what torch.load accepts with weights_only: tensors and parameters (no
        subclasses: gather shards first), Python's numbers, strings, bytes and None, torch's sizes,
        dtypes and devices, in dicts, lists, tuples and sets. Anything else is a TypeError.
        """
        if not 0 <= step <= LAST_STEP:
            raise ValueError(f"step must be from 0 to {LAST_STEP}; got {step}")
        _check_loadable(payload, "payload")
        path = self.folder / f"checkpoint-{step:012d}.pt"
        buffer = io.BytesIO()
        torch.save(payload, buffer)
        content = buffer.getbuffer()
        with explain_os_errors(CheckpointError, f"cannot save {path}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.folder)
            write_atomically(path, [content, _seal(step, content)])
        self._prune(step)
        return path

    def load_latest(self) -> LoadedCheckpoint | None:
        """Load the newest intact checkpoint; None if there are no checkpoints."""
        damaged: list[Path] = []
        for _ in range(100):
            damaged.clear()
            # Another process may save and prune after we list the folder and before we read a file.
            with contextlib.suppress(FileNotFoundError):
                for step, path in self._list():
                    payload = _load(step, path)
                    if payload is not None:
                        return LoadedCheckpoint(step, payload, path, tuple(damaged))
                    damaged.append(path)
                break
        if damaged:
            names = ", ".join(path.name for path in damaged)
            every = f"every checkpoint in {self.folder} is damaged: {names}"
            raise CheckpointError(f"{every}; remove them to start again")
        return None

    def load_step(self, step: int) -> LoadedCheckpoint | None:
        """Load the checkpoint of a step, or None; CheckpointError if it is damaged."""
        path = dict(self._list()).get(step)
        if path is None:
            return None
        with explain_os_errors(CheckpointError, f"cannot read {path}"):
            payload = _load(step, path)
        if payload is None:
            raise CheckpointError(f"{path} is damaged")
        return LoadedCheckpoint(step, payload, path)

    def list_steps(self) -> list[int]:
        """Return the steps that have a checkpoint, damaged or not, in ascending order."""
        return sorted(step for step, _ in self._list())

    def is_intact(self, step: int) -> bool:
        """Whether the checkpoint of a step is there and matches its checksum."""
        path = dict(self._list()).get(step)
        return path is not None and not _is_damaged(step, path)

    def _list(self) -> list[tuple[int, Path]]:
        """Return steps and paths, the newest first."""
        with explain_os_errors(CheckpointError, f"cannot read {self.folder}"):
            try:
                names = os.listdir(self.folder)
            except FileNotFoundError:
                return []
        matches = filter(None, map(NAME.fullmatch, names))
        return sorted(((int(m[1]), self.folder / m[0]) for m in matches), reverse=True)

    def _prune(self, saved: int) -> None:
        """Remove what is no longer needed after step `saved` was written."""
        kept = 0
        for step, path in self._list():
            # A later checkpoint may be a damaged one that the run skipped when it resumed. If it
            # counted, it would push out an intact one.
            intact = step <= saved or not _is_damaged(step, path)
            if intact and (kept < self.keep or step == saved):
                kept += 1
                continue
            # What cannot be removed now is tried again after the next save.
            with contextlib.suppress(OSError):
                path.unlink()


def _seal(step: int, content: memoryview) -> bytes:
    digest = hashlib.sha256(b"%012d" % step)
    digest.update(content)
    return SEAL % (step, digest.hexdigest().encode())


def _read_verified(step: int, path: Path) -> memoryview | None:
    """Return the content of a file without its seal; None if they do not match."""
    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        dangling = error.errno == errno.ENOENT and path.is_symlink()
        if error.errno == errno.EIO or dangling:
            return None
        if error.errno == errno.ENOENT:  # another process has removed it
            raise
        raise CheckpointError(f"cannot read {path}: {describe_os_error(error)}") from error
    content, seal = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
    return content if seal == _seal(step, content) else None


def _is_damaged(step: int, path: Path) -> bool:
    with contextlib.suppress(OSError, CheckpointError):
        return _read_verified(step, path) is None
    return False  # unreadable is not known to be damaged


def _load(step: int, path: Path) -> dict[str, Any] | None:
    """Return the payload, or None if the file is damaged."""
    content = _read_verified(step, path)
    if content is None:
        return None
    try:
        payload: dict[str, Any] = torch.load(io.BytesIO(content), "cpu", weights_only=True)
    except Exception as error:
        # The file is as it was written, so an earlier one would fail in the same way.
        first = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"{path} is intact, but torch {torch.__version__} cannot load it: {first}"
        ) from error
    return payload


def _check_loadable(value: Any, where: str) -> None:
    """Raise a TypeError for what torch.load(weights_only=True) would refuse, saying where it is."""
    kind = type(value)
    if kind in (dict, OrderedDict, Counter):
        for key, child in value.items():
            _check_loadable(key, f"the key {key!r} of {where}")
            _check_loadable(child, f"{where}[{key!r}]")
    elif kind in (list, tuple, set):
        for index, child in enumerate(value):
            _check_loadable(child, f"{where}[{index}]")
    elif kind not in LEAVES:
        raise TypeError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds only "
            "tensors and Python's own numbers, strings, lists, tuples and dicts"
        )
