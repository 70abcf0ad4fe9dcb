"""A ledger of runs: one JSON line per run, shared by many processes and many sittings.

A run is identified by its key, a frozen dataclass with a `seed`, and is not repeated.

    ledger = Ledger(Path("results/study.jsonl"), Key)
    runner = Runner(ledger, train, seconds=1200)
    runner.run(Key(lr=0.1, seed=0))     # trains, unless the ledger has it
    ledger.find(Key(lr=0.1, seed=0))    # what `train` returned
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import time
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from filelock import FileLock, Timeout

Run = dict[str, Any]  # what a run has recorded
POLL_SECONDS = 0.2


class SeededKey(Protocol):
    """What identifies a run: a frozen dataclass."""

    __dataclass_fields__: typing.ClassVar[dict[str, Any]]

    @property
    def seed(self) -> int: ...


Key = TypeVar("Key", bound=SeededKey)


class MissingRunError(LookupError):
    """The ledger does not have a run."""


class Ledger(Generic[Key]):
    """All runs of a study. `origin` is recorded with every run that is added."""

    def __init__(self, path: Path, key_type: type[Key], origin: Run | None = None) -> None:
        self.path, self._key_type, self.origin = path, key_type, origin or {}
        self.runs: dict[Key, Run] = {}
        self._bytes_read = 0
        self._cut_short = b""  # what follows the last whole line, as after a power failure
        self.refresh()

    def refresh(self) -> None:
        """Read what other processes have added."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._bytes_read)
            found = file.read()
        whole, _, self._cut_short = found.rpartition(b"\n")
        self._bytes_read += len(found) - len(self._cut_short)
        for line in whole.splitlines():
            try:
                run = json.loads(line)
            except json.JSONDecodeError:
                print(f"{self.path}: a line that was cut short is left out: {line[:60]!r}")
                continue
            self.runs[_load_dataclass(self._key_type, run["key"])] = run

    def add(self, key: Key, result: Run) -> None:
        line = {"key": dataclasses.asdict(key), **result, **self.origin}
        self.refresh()
        begin = "\n" if self._cut_short else ""  # a line without an end stays by itself
        with self.path.open("a") as file:
            file.write(f"{begin}{json.dumps(line)}\n")
        self.refresh()

    def find(self, key: Key) -> Run:
        if key not in self.runs:
            raise MissingRunError(key)
        return self.runs[key]

    def find_seeds(self, key: Key) -> dict[int, Run]:
        """The runs that differ from the key in nothing but the seed, by seed."""
        seeds = sorted({other.seed for other in self.runs})
        keys = [dataclasses.replace(key, seed=seed) for seed in seeds]
        return {each.seed: self.runs[each] for each in keys if each in self.runs}


def refuse_other_data(ledger: Ledger[Any], **given: str) -> None:
    """End the script if runs have other data, or other tokens: the key of a run does not say which.

    Runs of older ledgers do not say it at all.
    """
    for name, value in given.items():
        others = {run[name] for run in ledger.runs.values() if run.get(name, value) != value}
        if others:
            named = ", ".join(sorted(others))
            raise SystemExit(
                f"{ledger.path} has runs on {named}, not on {value}: name another --results"
            )


class Runner(Generic[Key]):
    """Runs what the ledger lacks, and starts no run after `seconds`.

    `train` returns what to record. Processes with the same `share` folder divide the work.
    """

    def __init__(
        self,
        ledger: Ledger[Key],
        train: Callable[[Key], Run],
        *,
        seconds: float = math.inf,
        share: Path | None = None,
    ) -> None:
        self.ledger, self.share, self._train = ledger, share, train
        self._deadline = time.monotonic() + seconds

    def run(self, key: Key) -> None:
        """Run it, unless it is recorded, another process is on it, or the time is up."""
        self.ledger.refresh()
        if key in self.ledger.runs or self._is_late():
            return
        with claim(self.share, key) as claimed:
            self.ledger.refresh()  # another process may have finished it since
            if claimed and key not in self.ledger.runs:
                self.ledger.add(key, self._train(key))

    def finish(self, key: Key) -> Run:
        """Run it, or wait until another process has; MissingRunError if the time is up first."""
        self.run(key)
        while key not in self.ledger.runs and not self._is_late():
            time.sleep(POLL_SECONDS)
            self.run(key)
        return self.ledger.find(key)

    def _is_late(self) -> bool:
        return time.monotonic() >= self._deadline


@contextlib.contextmanager
def claim(folder: Path | None, work: object) -> Iterator[bool]:
    """Whether this process may do the work: no other one that shares the folder is on it.

    A claim ends with the process that holds it, so nobody waits for a process that died.
    """
    if folder is None:
        yield True
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / hashlib.sha256(repr(work).encode()).hexdigest()[:16])
    try:
        held = lock.acquire(blocking=False)
    except Timeout:
        yield False
        return
    with held:
        yield True


def _load_dataclass(cls: type[Key], content: dict[str, Any]) -> Key:
    """The inverse of dataclasses.asdict, for a dataclass that may contain others."""
    types = typing.get_type_hints(cls)
    fields = {
        name: _load_dataclass(types[name], value) if isinstance(value, dict) else value
        for name, value in content.items()
    }
    return cls(**fields)
