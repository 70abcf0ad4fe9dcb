"""JSON that every reader accepts, with the NaN and infinities that JSON itself lacks.

They are written as the strings "NaN", "Infinity" and "-Infinity", which JavaScript's Number() and
Python's float() understand, and are read back as floats. Such a string itself is refused
(ValueError). Tuples come back as lists, paths as strings, NumPy's scalars as Python numbers; any
other value that JSON cannot hold is a TypeError that says where it is.
"""

import json
import math
from pathlib import PurePath
from typing import Any

import numpy as np

MAX_DEPTH = 50  # of nesting; no record comes near it
WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumps(value: Any, *, indent: int | None = None) -> bytes:
    """Encode as UTF-8, with a newline at the end and, without `indent`, nowhere else."""
    text = json.dumps(encode(value), ensure_ascii=False, allow_nan=False, indent=indent)
    # A file name that is not valid text has lone surrogates, which survive as escapes.
    return text.encode(errors="backslashreplace") + b"\n"


def loads(data: bytes) -> Any:
    """Decode what `dumps` wrote; ValueError if it is not JSON."""
    try:
        return _decode(json.loads(data))
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep") from None


def encode(value: Any, where: str = "the value") -> Any:
    """Convert to JSON's own types. Two values are written alike if their encodings are equal."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else json.dumps(float(value))
    if isinstance(value, str | PurePath):
        if str(value) in WORDS:
            raise ValueError(f"{where} is the string {str(value)!r}, which stands for a number")
        return str(value)
    if isinstance(value, list | tuple):
        return [encode(child, f"{where}[{index}]") for index, child in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}; keys must be strings")
        return {str(key): encode(child, f"{where}[{key!r}]") for key, child in value.items()}
    kind = type(value)
    raise TypeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}; records hold only numbers, strings, "
        "booleans, None, lists and dicts"
    )


def _decode(value: Any, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, str):
        return WORDS.get(value, value)
    if isinstance(value, list):
        return [_decode(child, depth + 1) for child in value]
    if isinstance(value, dict):
        return {key: _decode(child, depth + 1) for key, child in value.items()}
    return value
