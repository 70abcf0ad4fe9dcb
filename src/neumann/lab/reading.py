"""Reading the records of a run, also of one that is running or was killed.

Half a line at the end of the metrics, as a killed process may leave it, is passed over. UsageError
where a folder is not a run's; RecordsError, in one line, where a file is damaged or cannot be read.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

from neumann.lab import plain_json
from neumann.lab.errors import UsageError
from neumann.lab.files import StorageError, reason

CONFIG, METRICS, SUMMARY = "config.json", "metrics.jsonl", "summary.json"
FORMAT = 1  # of config.json; a reader refuses what it does not know


class RecordsError(StorageError):
    """The records cannot be written or read."""


class Line(NamedTuple):
    """A line of the metrics."""

    raw: bytes  # as in the file, with its newline
    fields: dict[str, Any]


def read_config(folder: Path) -> dict[str, Any]:
    """The resolved config of a run."""
    return _read_start(folder, "config")


def read_environment(folder: Path) -> dict[str, Any]:
    """The environment a run was started in."""
    return _read_start(folder, "environment")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All lines of a run, which may still be running; half a line at the end is passed over."""
    path = Path(folder) / METRICS
    data = _read(path)
    return [] if data is None else [line.fields for line in parse(data, path)]


def read_summary(folder: Path) -> dict[str, Any] | None:
    """What came out of a run; None if it has not finished."""
    path = Path(folder) / SUMMARY
    data = _read(path)
    return None if data is None else _object(data, path)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file that has to be there."""
    data = _read(path)
    if data is None:
        raise UsageError(f"there is no {path}")
    return _object(data, path)


def is_finished(folder: Path) -> bool:
    """Whether the run has its summary."""
    return os.path.isfile(Path(folder) / SUMMARY)


def _read_start(folder: Path, part: str) -> dict[str, Any]:
    path = Path(folder) / CONFIG
    data = _read(path)
    if data is None:
        raise UsageError(f"{folder} is not the folder of a run: it has no {CONFIG}")
    content = _object(data, path)
    if content.get("format") != FORMAT or not isinstance(content.get(part), dict):
        raise UsageError(f"{path} is not the config of a run that this version wrote")
    found: dict[str, Any] = content[part]
    return found


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RecordsError(f"cannot read {path}: {reason(error)}") from error


def _object(data: bytes, path: Path) -> dict[str, Any]:
    try:
        content = plain_json.loads(data)
    except ValueError as error:
        raise RecordsError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise RecordsError(f"{path} is damaged: it holds no JSON object")
    return content


def parse(data: bytes, path: Path) -> list[Line]:
    """The lines, without a torn one at the end. Damage elsewhere is an error."""
    # Only b"\n" ends a line: a string may hold others that splitlines() takes for ends.
    pieces = [piece for piece in data.split(b"\n") if piece.strip()]
    lines = []
    for number, piece in enumerate(pieces, start=1):
        try:
            fields = _object(piece, path)
        except RecordsError as error:
            if number == len(pieces):
                break
            raise RecordsError(f"{path} is damaged in line {number}") from error
        lines.append(Line(piece + b"\n", fields))
    return lines
