"""Settings from plain values, as files hold them."""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from neumann.lab.errors import UsageError, unknown

_Kind = TypeVar("_Kind")


def from_mapping(values: Mapping[str, Any], kind: type[_Kind]) -> _Kind:
    """A record of this kind from plain values; unknown keys are refused with the nearest."""
    fields = {field.name for field in dataclasses.fields(cast(Any, kind))}
    for key in values:
        if key not in fields:
            raise unknown("setting", key, sorted(fields))
    given = dict(values)
    for key in ("data_dir", "output"):
        if given.get(key) is not None:
            given[key] = Path(given[key])
    if "arms" in given:
        arms = given["arms"]
        if not isinstance(arms, list | tuple) or not all(isinstance(arm, str) for arm in arms):
            raise UsageError(f'arms must be a list, as in ["neumann", "sgd"]; got {arms!r}')
        given["arms"] = tuple(arms)
    return kind(**given)


def from_file(path: Path, kind: type[_Kind]) -> _Kind:
    """A record of this kind from a TOML file of flags, with - or _ in their names."""
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is not TOML: {error}") from error
    return from_mapping({key.replace("-", "_"): value for key, value in values.items()}, kind)
