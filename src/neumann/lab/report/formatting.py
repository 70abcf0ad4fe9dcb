"""Numbers, lists and settings as text, with only the digits that carry information."""

import math
import re
from collections.abc import Sequence
from typing import Any

from neumann.lab.metrics import ACCURACY, Quantity
from neumann.lab.studies.rounding import choose_rounding, format_p, half_width
from neumann.lab.studies.statistics import Difference, Interval

NONE = "–"  # shown where there is no value
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
# Control characters except tab and newline, and halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """Replace characters that no page can hold, such as those of a file name that is not text."""
    return _UNPRINTABLE.sub("\ufffd", text)


def format_interval(
    value: Interval | Difference, quantity: Quantity = ACCURACY, *, signed: bool = False
) -> str:
    """Format the mean, with half the width of its interval if there is one."""
    if value.mean is None:
        return NONE
    rounding, half = choose_rounding(value, quantity), half_width(value)
    text = rounding.format(value.mean, signed=signed)
    return text if half is None else f"{text} ± {rounding.format(half)}"


def format_limits(value: Interval | Difference, quantity: Quantity = ACCURACY) -> str:
    if value.low is None or value.high is None:
        return ""
    rounding = choose_rounding(value, quantity)
    return f"{rounding.format(value.low)} to {rounding.format(value.high)}"


def format_p_value(found: Difference) -> str:
    return NONE if found.p is None else format_p(found.p, found.level)


def format_seconds(value: float | None, unit: str = "") -> str:
    """Format a duration in seconds; from ten minutes on, also in minutes or hours.

    `unit` stands behind the seconds, as in " s".
    """
    if value is None or not math.isfinite(value):
        return NONE
    if value < 10:
        return f"{value:.2f}{unit}"
    if value < 600:
        return f"{value:.1f}{unit}"
    hours, rest = divmod(round(value), 3600)
    longer = f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min"
    return f"{value:,.0f}{unit} ({longer})"


def format_value(value: float | None, spec: str) -> str:
    return NONE if value is None or not math.isfinite(value) else format(value, spec)


def format_count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def format_list(names: Sequence[str]) -> str:
    """Join names into "a, b and c"."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def join_sentences(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def format_setting(value: Any) -> str:
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def format_short(value: float) -> str:
    """Format as 0.02, 3 or 2,000, and as a power of ten what would need many zeros."""
    return f"{value:,g}" if value <= 0 or 1e-3 <= value < 1e6 else format_power(value)


def format_power(value: float) -> str:
    """Format a positive number as 10⁻³ or 2·10⁻³."""
    exponent = math.floor(math.log10(value) + 1e-9)
    factor = value / 10.0**exponent
    power = f"10{str(exponent).translate(SUPERSCRIPTS)}"
    return power if math.isclose(factor, 1, rel_tol=1e-6) else f"{factor:.3g}·{power}"
