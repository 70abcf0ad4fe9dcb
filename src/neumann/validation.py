"""Checks of arguments. An error names the argument, its value and what would be right."""

import math
import numbers
from typing import Any

_LONGEST = 100  # characters of a value in an error


def require(good: bool, name: str, value: Any, wanted: str) -> None:
    """Raise a ValueError unless the value is good."""
    if not good:
        raise ValueError(f"{name} must be {wanted}, got {describe(value)}")


def describe(value: Any) -> str:
    """The value on one short line: tensors and modules have long representations."""
    shown = " ".join(repr(value).split())
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…"


def is_number(value: Any) -> bool:
    """Whether the value is a finite real number (and not a bool)."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        return is_real and math.isfinite(value)
    except OverflowError:  # an int beyond the range of floats
        return False


def is_count(value: Any) -> bool:
    """Whether the value is an integer (and not a bool)."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def require_positive(name: str, value: Any) -> None:
    """Raise a ValueError unless the value is a finite number above 0."""
    require(is_number(value) and value > 0, name, value, "a finite number above 0")


def require_integer(name: str, value: Any, least: int) -> None:
    """Raise a ValueError unless the value is an int of at least this."""
    good = isinstance(value, int) and not isinstance(value, bool) and value >= least
    require(good, name, value, f"an integer of at least {least}")
