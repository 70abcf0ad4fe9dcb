"""Settings in files: reading them, and comparing them with those of an existing folder.

A setting that a folder does not mention, because it was written before the setting existed, had
today's default. So the folder agrees with the current settings if they have the default.
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from neumann.lab.config import TrainConfig
from neumann.lab.contenders import Contender
from neumann.lab.errors import UsageError, require, unknown

MAX_DIFFERENCES = 3  # that a message names
_ABSENT = object()
_Kind = TypeVar("_Kind")


def parse_settings(values: Mapping[str, Any], kind: type[_Kind]) -> _Kind:
    # No file may allow its own code.
    fields = {field.name for field in dataclasses.fields(cast(Any, kind))} - {"allow_code"}
    for key in values:
        if key not in fields:
            raise unknown("setting", key, sorted(fields))
    given = dict(values)
    for key in ("data_dir", "output"):
        if given.get(key) is not None:
            text = given[key]
            require(isinstance(text, str), f"{key} must be a path, got {text!r:.40}")
            given[key] = Path(text)
    if "arms" in given:
        arms = given["arms"]
        listed = isinstance(arms, list | tuple) and all(isinstance(arm, str) for arm in arms)
        require(listed, f'arms must be a list, as in ["neumann-spectral", "sgd"]; got {arms!r}')
        given["arms"] = tuple(arms)
    return kind(**given)


def list_code(settings: Any) -> list[str]:
    """Return every MODULE:FUNCTION that these settings would run."""
    arms = [*getattr(settings, "arms", ()), getattr(settings, "opt", None)]
    found = [Contender.parse(arm).arm.code for arm in arms if arm is not None]
    return [code for code in [*found, getattr(settings, "entry", None)] if code is not None]


def read_toml(path: Path, flag: str = "") -> dict[str, Any]:
    """Read a TOML file; `flag` comes before its name in errors."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{flag}{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag}{path} is not TOML: {error}") from error


def load_settings(path: Path, kind: type[_Kind]) -> _Kind:
    """Read settings of this kind from a TOML file of flags, with - or _ in their names."""
    values = read_toml(path, "--config ")
    return parse_settings({key.replace("-", "_"): value for key, value in values.items()}, kind)


def fill_in_defaults(
    saved: Mapping[str, Any], current: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Add to `saved` each setting that it lacks and that has its default in `current`."""
    unchanged = {k: v for k, v in current.items() if k in defaults and defaults[k] == v}
    return {**unchanged, **saved}


def fill_in_run_defaults(
    saved: Mapping[str, Any], current: Mapping[str, Any], processes: int
) -> dict[str, Any]:
    """Like `fill_in_defaults`, for the resolved config of a run: "auto" in defaults is resolved."""
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    known = {key: current[key] for key in names & saved.keys() & current.keys()}
    try:
        defaults = TrainConfig(**known).resolve(processes).as_dict()
    except (TypeError, ValueError, AttributeError):  # these are not settings of a run
        defaults = {}
    return fill_in_defaults(saved, current, defaults)


def refuse_difference(
    folder: Path,
    content: str,
    saved: Any,
    current: Any,
    advice: str = "choose another folder, or remove this one",
) -> None:
    """Raise a UsageError that names the first keys whose values differ, if any does."""
    before, now = (flatten(found) if isinstance(found, dict) else {} for found in (saved, current))
    differences = [
        f"{key} is {_show(before, key)} there, {_show(now, key)} here"
        for key in now | before
        if before.get(key, _ABSENT) != now.get(key, _ABSENT)
    ]
    more = len(differences) - MAX_DIFFERENCES
    if more > 0:
        differences[MAX_DIFFERENCES:] = [f"and {more} more"]
    found = ", ".join(differences)
    require(not found, f"{folder} holds {content}: {found}; {advice}")


def _show(flat: dict[str, Any], key: str) -> str:
    text = repr(flat[key]) if key in flat else "not set"
    return text if len(text) <= 40 else text[:39] + "…"


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Join nested keys with dots: {"a": {"b": 1}} becomes {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
