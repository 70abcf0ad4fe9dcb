"""The book of all runs of the large-batch contest, and which process is at which run.

A run is known by its key; one that is in the book is not repeated.
"""

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Setting:
    """One choice of what is tuned."""

    lr: float
    decay: float
    momentum: float


@dataclass(frozen=True)
class Key:
    """What a run is."""

    stage: str  # search: held-out images; final: test set; time: alone on the machine
    model: str
    batch: int
    epochs: int
    entrant: str
    setting: Setting
    seed: int = 0


def accuracy(run: dict[str, Any]) -> float:
    """Of a run, in %, with BatchNorm statistics of the final weights if it has BatchNorm."""
    return float(run["accuracy"] if run["recalibrated"] is None else run["recalibrated"])


class Missing(Exception):
    """A run that is not there."""


class Ledger:
    """All runs, a line of JSON each; several processes may add to one file."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self._about = path, about
        self.runs: dict[Key, dict[str, Any]] = {}
        self._read = 0  # bytes
        self.refresh()

    def refresh(self) -> None:
        """Learn what others have added. A line is written at once, so none is ever half there."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._read)
            lines = file.read()
        self._read += len(lines)
        for line in lines.splitlines():
            run = json.loads(line)
            key = dict(run["key"])
            self.runs[Key(**{**key, "setting": Setting(**key["setting"])})] = run

    def add(self, key: Key, result: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"key": asdict(key), **result, **self._about}) + "\n")
        self.refresh()

    def score(self, key: Key) -> float:
        """The accuracy of a run; Missing if there is none."""
        if key not in self.runs:
            raise Missing
        return accuracy(self.runs[key])

    def seeds(self, wanted: Key) -> dict[int, Any]:
        """The runs that differ in their seed alone, by seed."""
        return {
            key.seed: run
            for key, run in sorted(self.runs.items(), key=lambda item: item[0].seed)
            if replace(key, seed=wanted.seed) == wanted
        }


@contextlib.contextmanager
def claim(folder: Path | None, work: object) -> Iterator[bool]:
    """Whether this work is ours for now: no other process that shares the folder is at it.

    A claim ends with its process, so that nobody waits for one that died.
    """
    if folder is None:
        yield True
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / hashlib.sha256(repr(work).encode()).hexdigest()[:16]).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
