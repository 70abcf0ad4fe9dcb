"""The records of a run: a folder with three files, readable at any moment.

config.json     the resolved config, the environment it was started in, and a hash of its text
metrics.jsonl   one JSON object per line, each with its "kind" ("step", "epoch", …); appended
summary.json    the result; written when the run finishes, so its presence says that it has

How it can fail: UsageError if the folder is not a run's, belongs to another run, or is in use by
another process; RecordsError, in one line, if a file cannot be written or is damaged.
"""

import math
import os
from contextlib import AbstractContextManager
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

from neumann.lab.config_files import fill_in_run_defaults, refuse_difference
from neumann.lab.errors import UsageError
from neumann.lab.storage import strict_json
from neumann.lab.storage.atomic_files import (
    BINARY,
    explain_os_errors,
    remove_leftovers,
    write_atomically,
    write_fully,
)
from neumann.lab.storage.folders import FolderLock, refuse_link
from neumann.lab.storage.reading import (
    CONFIG,
    FORMAT,
    METRICS,
    SUMMARY,
    RecordsError,
    parse_metrics,
    read_config,
    read_json_object,
)
from neumann.lab.training.environment import describe_environment
from neumann.lab.training.processes import count_processes

CHECKPOINTS, TENSORBOARD = "checkpoints", "tensorboard"  # folders of a run, next to its records


class Diverged(RuntimeError):
    """The loss was not finite."""

    def __init__(self, step: int, lr: float, checkpoint: str | None) -> None:
        self.step, self.lr, self.checkpoint = step, lr, checkpoint
        where = "there is no checkpoint"
        if checkpoint:
            where = f"the last good checkpoint is {checkpoint}"
        super().__init__(f"the loss was not finite in step {step} at lr {lr:g}; {where}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.step, self.lr, self.checkpoint)


class Records:
    """Writes the records of one run; it locks the folder from `begin` or the first write on."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._descriptor: int | None = None
        self._lock: FolderLock | None = None

    def begin(self, config: dict[str, Any], data_hash: str | None = None) -> Self:
        """Create the folder of the run, or continue it if it holds the same config and data.

        Where neither is possible, this raises a UsageError and changes nothing.
        """
        strict_json.encode(config, "config")  # first of all: can it be written?
        try:
            with explain_os_errors(UsageError, f"cannot start a run in {self.folder}"):
                self.folder.mkdir(parents=True, exist_ok=True)
                for name in (CONFIG, METRICS, SUMMARY, CHECKPOINTS, TENSORBOARD):
                    refuse_link(self.folder / name)
                self._acquire_lock()
                if os.path.exists(self.folder / CONFIG):
                    check_same_config(self.folder, config)
                    check_same_data(self.folder, data_hash)
                else:
                    self._write_config(config, data_hash)
        except BaseException:
            self.close()
            raise
        return self

    def _write_config(self, config: dict[str, Any], data_hash: str | None) -> None:
        for name in (METRICS, SUMMARY, CHECKPOINTS):
            if os.path.exists(self.folder / name):
                raise UsageError(
                    f"{self.folder} holds {name} but no {CONFIG}, so its run is incomplete; "
                    "choose another folder"
                )
        remove_leftovers(self.folder)
        content = {"format": FORMAT, "config": config, "environment": describe_environment()}
        if data_hash is not None:
            content["data_hash"] = data_hash
        write_atomically(self.folder / CONFIG, [strict_json.dumps(content, indent=2)])

    def append(self, *, kind: str, **fields: Any) -> None:
        """Add a line. If that fails, remove what was written of it."""
        step = fields.get("step", 0)
        if type(step) is not int:
            raise TypeError(f"step must be an int, the step of the line; got {step!r}")
        line = strict_json.dumps({"kind": kind, **fields})
        with self._explain_os_errors(METRICS):
            if self._descriptor is None:
                self._acquire_lock()
                self._drop_lines_after(math.inf)
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | BINARY
                self._descriptor = os.open(self.folder / METRICS, flags, 0o666)
            length = os.fstat(self._descriptor).st_size
            try:
                write_fully(self._descriptor, line)
            except OSError:
                os.ftruncate(self._descriptor, length)
                raise

    def rewind(self, step: int) -> None:
        """Remove the summary and all lines from the first one with a later step on."""
        self._close_metrics()
        with self._explain_os_errors(METRICS):
            self._acquire_lock()
            # This comes first, because a run without its last lines has not finished.
            (self.folder / SUMMARY).unlink(missing_ok=True)
            remove_leftovers(self.folder)
            self._drop_lines_after(step)

    def sync(self) -> None:
        """Make the lines survive a power cut. Call this before saving a checkpoint."""
        if self._descriptor is not None:
            with self._explain_os_errors(METRICS):
                os.fsync(self._descriptor)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary, which marks the run as finished, and close."""
        content = strict_json.dumps(summary, indent=2)
        self.sync()
        with self._explain_os_errors(SUMMARY):
            write_atomically(self.folder / SUMMARY, [content])
        self.close()

    def close(self) -> None:
        """Close the file and unlock the folder. The next append opens and locks again."""
        self._close_metrics()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _acquire_lock(self) -> None:
        self._lock = self._lock or FolderLock(self.folder)

    def _drop_lines_after(self, step: float) -> None:
        """Remove the lines after a step, and an incomplete one at the end."""
        path = self.folder / METRICS
        data = path.read_bytes() if path.exists() else b""
        lines = parse_metrics(data, path)
        kept = takewhile(lambda line: line[1].get("step", step) <= step, lines)
        content = b"".join(raw for raw, _ in kept)
        if content != data:
            write_atomically(path, [content])

    def _close_metrics(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _explain_os_errors(self, name: str) -> AbstractContextManager[None]:
        return explain_os_errors(RecordsError, f"cannot write {self.folder / name}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def check_same_config(folder: Path, config: dict[str, Any]) -> None:
    """Raise a UsageError that names the difference if the folder's run has another config."""
    saved = fill_in_run_defaults(read_config(folder), config, count_processes())
    # Compare as written: there a tuple is a list, and NaN equals itself.
    written = strict_json.encode(saved), strict_json.encode(config)
    refuse_difference(folder, "a run with another config", *written)


def check_same_data(folder: Path, data_hash: str | None) -> None:
    """Raise a UsageError if the folder's run was started on a text with another hash."""
    saved = read_json_object(folder / CONFIG).get("data_hash")
    if None not in (saved, data_hash) and saved != data_hash:
        raise UsageError(
            f"{folder} holds a run on another text: the files of --data have changed since it "
            "began; restore them, or choose another --output"
        )
