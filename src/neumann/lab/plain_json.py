"""JSON that every reader takes, and that keeps numbers which JSON does not have.

A training that diverges has NaN and infinities to record. JSON has no such numbers, so they are
written as the strings "NaN", "Infinity" and "-Infinity", which JavaScript's Number() and Python's
float() understand, and read back as floats. A string that is one of these three words would come
back as a number, so it is refused (ValueError). What JSON cannot hold is a TypeError that names
where it is. Tuples come back as lists, paths and NumPy's scalars as strings and numbers.
"""

import json
import math
from pathlib import PurePath
from typing import Any

import numpy as np

WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumps(value: Any, *, indent: int | None = None) -> bytes:
    """The value as UTF-8, with a newline at the end and, without `indent`, nowhere else."""
    plain = encode(value)
    try:
        text = json.dumps(plain, ensure_ascii=False, allow_nan=False, indent=indent)
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        # A file name that is no text holds half characters; as escapes they survive.
        return json.dumps(plain, allow_nan=False, indent=indent).encode() + b"\n"


def loads(data: bytes) -> Any:
    """The value that `dumps` wrote; ValueError if it is not JSON."""
    return _decode(json.loads(data))


def encode(value: Any, where: str = "the value") -> Any:
    """The value in JSON's own types, as it will be read by others: for comparing, too."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _word(value)
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
        f"{where} is a {kind.__module__}.{kind.__qualname__}; records hold numbers, strings, "
        "booleans, None, lists and dicts only"
    )


def _word(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _decode(value: Any) -> Any:
    if isinstance(value, str):
        return WORDS.get(value, value)
    if isinstance(value, list):
        return [_decode(child) for child in value]
    if isinstance(value, dict):
        return {key: _decode(child) for key, child in value.items()}
    return value
