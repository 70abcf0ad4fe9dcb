"""Reading the records of a run, also while it runs or after it was killed.

A killed process may leave half a line at the end of the metrics; readers skip it. Raises UsageError
for a folder that is not a run's, and RecordsError for a file that is damaged or unreadable.
"""

import os
from pathlib import Path
from typing import Any

from neumann.lab.errors import UsageError
from neumann.lab.storage import strict_json
from neumann.lab.storage.atomic_files import StorageError, explain_os_errors
from neumann.lab.storage.field_types import MAX_COUNT

CONFIG, METRICS, SUMMARY = "config.json", "metrics.jsonl", "summary.json"
RESTORE = "restore it from a backup, or remove its folder to train again"
FORMAT = 1  # of config.json; a reader refuses formats that it does not know


class RecordsError(StorageError):
    """The records of a run cannot be written or read."""


def read_config(folder: Path, part: str = "config") -> dict[str, Any]:
    """Return the resolved config of a run, or another part of its config.json."""
    content = _read_object(folder / CONFIG)
    if content is None:
        raise UsageError(f"{folder} is not the folder of a run: it has no {CONFIG}")
    found = content.get(part)
    if content.get("format") != FORMAT or not isinstance(found, dict):
        raise UsageError(f"{folder / CONFIG} is not the config of a run that this version can read")
    return found


def read_environment(folder: Path) -> dict[str, Any]:
    """Return the environment that a run was started in."""
    return read_config(folder, "environment")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return all complete lines of a run, which may still be running."""
    data = _read(folder / METRICS) or b""
    return [fields for _, fields in parse_metrics(data, folder / METRICS)]


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return the result of a run, or None if it has not finished."""
    return _read_object(folder / SUMMARY)


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file that has to exist."""
    content = _read_object(path)
    if content is None:
        raise UsageError(f"there is no {path}")
    return content


def is_finished(folder: Path) -> bool:
    return os.path.isfile(folder / SUMMARY)


def parse_metrics(data: bytes, path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Return each line as written and parsed, without an incomplete one at the end."""
    # Only b"\n" ends a line: splitlines() would also split at characters inside a string.
    pieces = [piece for piece in data.split(b"\n") if piece.strip()]
    lines = []
    for number, piece in enumerate(pieces, start=1):
        try:
            fields = _parse_object(piece, path)
        except RecordsError as error:
            if number < len(pieces):
                raise RecordsError(f"{path} is damaged in line {number}; {RESTORE}") from error
            continue
        step = fields.get("step", 0)
        if type(step) is not int or not 0 <= step <= MAX_COUNT:
            wrong = f"step should be a whole number of at least 0, got {step!r:.40}"
            raise RecordsError(f"{path} is damaged in line {number}: {wrong}; {RESTORE}")
        lines.append((piece + b"\n", fields))
    return lines


def _read(path: Path) -> bytes | None:
    with explain_os_errors(RecordsError, f"cannot read {path}"):
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None


def _read_object(path: Path) -> dict[str, Any] | None:
    data = _read(path)
    return None if data is None else _parse_object(data, path)


def _parse_object(data: bytes, path: Path) -> dict[str, Any]:
    try:
        content = strict_json.loads(data)
    except ValueError as error:
        raise RecordsError(f"{path} is damaged: {error}; {RESTORE}") from error
    if not isinstance(content, dict):
        raise RecordsError(f"{path} is damaged: it is not a JSON object; {RESTORE}")
    return content
