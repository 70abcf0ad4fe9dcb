"""Numbers and lists in words, with as many digits as say something."""

import math
from collections.abc import Sequence
from typing import Any

from neumann.lab.statistics import Difference, Interval

NOTHING = "–"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def interval(found: Interval | Difference, *, signed: bool = False) -> str:
    """The mean, with half the width of its interval where there is one."""
    if found.mean is None:
        return NOTHING
    text = f"{found.mean + 0.0:+.2f}" if signed else f"{found.mean:.2f}"
    if found.low is not None and found.high is not None:
        text += f" ± {(found.high - found.low) / 2:.2f}"
    return text.replace("-", "−")


def limits(found: Interval | Difference) -> str:
    """The interval itself."""
    if found.low is None or found.high is None:
        return NOTHING
    return f"{found.low:.2f} to {found.high:.2f}".replace("-", "−")


def probability(p: float | None) -> str:
    """A p value."""
    if p is None:
        return NOTHING
    return "< 0.001" if p < 0.001 else f"{p:.2g}"


def seconds(value: float | None) -> str:
    """A duration in seconds; from ten minutes on with what it is in minutes or hours."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value < 10:
        return f"{value:.2f}"
    if value < 600:
        return f"{value:.1f}"
    hours, rest = divmod(round(value), 3600)
    longer = f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min"
    return f"{value:,.0f} ({longer})"


def percent(value: Any) -> str:
    """An accuracy, without its sign."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    return f"{number:.2f}" if math.isfinite(number) else NOTHING


def count(number: int, thing: str) -> str:
    """As in "1 training", "2 trainings"."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def listed(names: Sequence[str]) -> str:
    """As in "a, b and c"."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def plain(value: Any) -> str:
    """A setting as text."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def short(value: float) -> str:
    """0.02, 3, 2,000; as a power of ten what would need many zeros."""
    return f"{value:,g}" if value <= 0 or 1e-3 <= value < 1e6 else power(value)


def power(value: float) -> str:
    """A positive number as 10⁻³ or 2·10⁻³."""
    exponent = math.floor(math.log10(value) + 1e-9)
    factor = value / 10.0**exponent
    shown = f"10{str(exponent).translate(SUPERSCRIPTS)}"
    return shown if math.isclose(factor, 1, rel_tol=1e-6) else f"{factor:.3g}·{shown}"
