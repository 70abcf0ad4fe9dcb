"""The records of a run: a folder with three files, readable at any moment.

config.json     the resolved config, and the environment it was started in
metrics.jsonl   one JSON object a line, each with its "kind" ("step", "epoch", …); appended
summary.json    what came out; there once the run has finished, so it also says that it has

A line is one write. A killed process may still leave half of one at the end; readers pass over it
and the next writer removes it. A step's lines are to be appended before its checkpoint is saved:
then `rewind(step)` after a resume leaves exactly the lines the checkpoint knows of. NaN and
infinities are written as strings (see plain_json).

Who writes has the folder to itself (see locks), from `create` or the first write until `close`;
anybody may read. A setting that the config lacks because it is younger is as it is by default.

How it can fail: UsageError where the folder is not a run's, another run's, or in use by another
process; RecordsError, in one line, where a file cannot be written or was damaged.
"""

import os
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from neumann.lab import plain_json
from neumann.lab.defaults import completed_run
from neumann.lab.differences import difference_of
from neumann.lab.environment import environment
from neumann.lab.errors import UsageError
from neumann.lab.files import reason, remove_leftovers, write_all, write_aside
from neumann.lab.locks import Claim
from neumann.lab.reading import (
    CONFIG,
    FORMAT,
    METRICS,
    SUMMARY,
    RecordsError,
    is_finished,
    parse,
    read_config,
    read_environment,
    read_metrics,
    read_summary,
)

__all__ = [
    "Records",
    "RecordsError",
    "environment",
    "is_finished",
    "read_config",
    "read_environment",
    "read_metrics",
    "read_summary",
]


class Records:
    """The records of one run, for the process that writes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.continued = False  # whether the folder held this run's config already
        self._descriptor: int | None = None
        self._claim: Claim | None = None

    @classmethod
    def create(cls, folder: Path, config: dict[str, Any]) -> Self:
        """Records that have begun."""
        records = cls(folder)
        records.begin(config)
        return records

    def begin(self, config: dict[str, Any]) -> None:
        """Make the folder of the run, or open it for continuation if it holds the same config.

        If it holds another config, or lines without any, or another process writes there:
        UsageError, and nothing is changed.
        """
        plain_json.encode(config, "config")  # what cannot be written is refused first
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._claim = self._claim or Claim(self.folder)
        except OSError as error:
            raise self._no_start(error) from error
        try:
            self.continued = os.path.exists(self.folder / CONFIG)
            if self.continued:
                refuse_another(self.folder, config)
            else:
                self._start(config)
        except BaseException:
            self.close()
            raise

    def _start(self, config: dict[str, Any]) -> None:
        for name in (METRICS, SUMMARY):
            if os.path.exists(self.folder / name):
                raise UsageError(
                    f"{self.folder} holds a {name} but no {CONFIG}, so it is not known what run "
                    "it is of; choose another folder"
                )
        content = {"format": FORMAT, "config": config, "environment": environment()}
        try:
            remove_leftovers(self.folder)
            write_aside(self.folder / CONFIG, [plain_json.dumps(content, indent=2)])
        except OSError as error:
            raise self._no_start(error) from error

    def _no_start(self, error: OSError) -> UsageError:
        return UsageError(f"cannot start a run in {self.folder}: {reason(error)}")

    def append(self, *, kind: str, **fields: Any) -> None:
        """Add a line. On failure it is taken back, so that the file stays as it was."""
        step = fields.get("step", 0)
        if type(step) is not int:
            raise TypeError(f"step must be an int, the step the line is of; got {step!r}")
        line = plain_json.dumps({"kind": kind, **fields})
        try:
            if self._descriptor is None:
                self._claim = self._claim or Claim(self.folder)
                self._descriptor = _open_whole(self.folder / METRICS)
            length = os.fstat(self._descriptor).st_size
            try:
                write_all(self._descriptor, line)
            except OSError:
                os.ftruncate(self._descriptor, length)
                raise
        except OSError as error:
            raise self._failure(METRICS, error) from error

    def rewind(self, step: int) -> None:
        """Drop what was recorded after a step, and the summary: the run goes on from there.

        The first line whose "step" is later, and all after it, go; so does a torn last line.
        """
        self._close_lines()
        path = self.folder / METRICS
        try:
            self._claim = self._claim or Claim(self.folder)
            # First, since a run without its last lines has not finished.
            (self.folder / SUMMARY).unlink(missing_ok=True)
            remove_leftovers(self.folder)
            data = path.read_bytes() if path.exists() else b""
            early = takewhile(lambda line: line.fields.get("step", step) <= step, parse(data, path))
            kept = b"".join(line.raw for line in early)
            if kept != data:
                write_aside(path, [kept])
        except OSError as error:
            raise self._failure(METRICS, error) from error

    def sync(self) -> None:
        """Make the lines outlast a power cut: to be called before a checkpoint is saved."""
        if self._descriptor is not None:
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                raise self._failure(METRICS, error) from error

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary, which says that the run has finished, and close."""
        content = plain_json.dumps(summary, indent=2)
        self.sync()
        try:
            write_aside(self.folder / SUMMARY, [content])
        except OSError as error:
            raise self._failure(SUMMARY, error) from error
        self.close()

    def close(self) -> None:
        """Close the file and let others have the folder; the next append takes both again."""
        self._close_lines()
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def _close_lines(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _failure(self, name: str, error: OSError) -> RecordsError:
        return RecordsError(f"cannot write {self.folder / name}: {reason(error)}")


def refuse_another(folder: Path, config: dict[str, Any]) -> None:
    """UsageError if the run in the folder has another config, naming the difference."""
    there = completed_run(read_config(folder), config)
    # Compared as they are written: a tuple is a list there, and NaN is equal to itself.
    difference = difference_of(plain_json.encode(there), plain_json.encode(config))
    if difference:
        raise UsageError(
            f"{folder} holds a run with another config: {difference}; choose another folder, or "
            "remove this one"
        )


def _open_whole(path: Path) -> int:
    """A descriptor for appending to a file that ends with a whole line."""
    data = path.read_bytes() if path.exists() else b""
    whole = b"".join(line.raw for line in parse(data, path))
    if whole != data:
        write_aside(path, [whole])
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
