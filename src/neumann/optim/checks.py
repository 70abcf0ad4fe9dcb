"""What options have in common that must be numbers.

Errors name the argument, the value it had and what would be right.
"""

import math
import numbers
from typing import Any


def require(good: bool, name: str, value: Any, wanted: str) -> None:
    """Refuse a value that is not what is wanted."""
    if not good:
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def is_number(value: Any) -> bool:
    """Finite, and no truth value."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and math.isfinite(value)


def is_count(value: Any) -> bool:
    """Whole, and no truth value."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
