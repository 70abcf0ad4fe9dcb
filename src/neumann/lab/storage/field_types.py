"""Checking what a file holds against the declared types of a dataclass.

A record may have been edited, damaged or written by someone else, so nothing in it is used before
its type is known. Fields without a default must be there; keys that the dataclass does not know are
left to newer versions. Integers in records are counts: from 0 to `MAX_COUNT`.
"""

import dataclasses
import math
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

MAX_COUNT = 10**12 - 1  # as many digits as the name of a checkpoint has
LARGEST_FLOAT = 1.7e308

_FINITE = "finite"
Finite = Annotated[float, _FINITE]  # a number that is neither NaN nor infinite
_NAMES = {int: "a whole number of at least 0", float: "a number", str: "text", Path: "text"}
_NAMES |= {bool: "true or false", NoneType: "null", list: "a list", tuple: "a list"}


def find_wrong_field(content: Any, kind: type[Any]) -> str | None:
    """Say which field of a JSON object does not have its declared type; None if all have."""
    if not isinstance(content, dict):
        return "it is not a JSON object"
    hints = _get_hints(cast(Any, kind))  # mypy: type[Any] is not hashable
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if field.name not in content:
            if field.default is field.default_factory is dataclasses.MISSING:
                return f"{field.name} is missing"
        elif not _has_type(content[field.name], hint):
            inside = _find_inside(content[field.name], hint)
            if inside is not None:
                return f"in {field.name}, {inside}"
            value = repr(content[field.name])
            shown = value if len(value) <= 40 else value[:39] + "…"
            return f"{field.name} should be {_describe(hint)}, got {shown}"
    return None


@cache
def _get_hints(kind: type[Any]) -> dict[str, Any]:
    """Return the declared types; a long run has many lines of few kinds."""
    return get_type_hints(kind, include_extras=True)


def _find_inside(value: Any, hint: Any) -> str | None:
    """Say which field of a nested object is wrong, if the hint names one kind of object."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [each for each in options if dataclasses.is_dataclass(each)]
    if len(kinds) != 1 or not isinstance(value, dict):
        return None
    return find_wrong_field(value, cast(type[Any], kinds[0]))


def _has_type(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_has_type(value, each) for each in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is Annotated:
        fits = _has_type(value, arguments[0])
        return fits and (_FINITE not in arguments or math.isfinite(value))
    if origin in (list, tuple):
        return isinstance(value, list) and all(_has_type(child, arguments[0]) for child in value)
    if origin is dict:
        return isinstance(value, dict) and all(_has_type(v, arguments[1]) for v in value.values())
    if dataclasses.is_dataclass(hint):
        return isinstance(hint, type) and find_wrong_field(value, hint) is None
    if hint is int:
        return type(value) is int and 0 <= value <= MAX_COUNT
    if hint is float:
        # An int may be too large for a float; NaN and infinities are floats.
        return type(value) is float or (type(value) is int and abs(value) <= LARGEST_FLOAT)
    return isinstance(value, str if hint is Path else hint)


def _describe(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_describe(each) for each in arguments)
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is Annotated:
        return "a finite number" if _FINITE in arguments else _describe(arguments[0])
    return _NAMES.get(origin or hint, "a JSON object")
