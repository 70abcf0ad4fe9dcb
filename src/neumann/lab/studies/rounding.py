"""How results are rounded: a number has the same digits in a sentence, a table and a chart.

A mean and its interval have the digits of their quantity, more if the interval would vanish.
"""

import math
from dataclasses import dataclass

from neumann.lab.metrics import Quantity
from neumann.lab.studies.statistics import Difference, Interval

LARGE = 1e6  # from here on, three significant digits say enough
NEGLIGIBLE = 1e-9  # in the unit of the score, which is never that exact: floats differ, not runs
MINUS = "−"


@dataclass(frozen=True)
class Rounding:
    digits: int | None  # after the point; None: three significant ones

    def format(self, value: float, *, signed: bool = False) -> str:
        sign = "+" if signed else ""
        if self.digits is None:
            return f"{value:{sign}.3g}".replace("-", MINUS, value < 0)
        # Adding zero turns −0 into 0.
        return f"{round(value, self.digits) + 0.0:{sign}.{self.digits}f}".replace("-", MINUS)


def choose_rounding(found: Interval | Difference, quantity: Quantity) -> Rounding:
    """Choose the digits of a mean and its limits from what decides about them: the half-width."""
    if found.mean is None:
        return Rounding(quantity.digits)
    scale = abs(found.mean) if not (half := half_width(found)) else half
    if scale >= LARGE:
        return Rounding(None)
    if is_negligible(scale) or round(scale, quantity.digits) > 0:
        return Rounding(quantity.digits)
    return Rounding(min(1 - math.floor(math.log10(scale)), 15))


def half_width(found: Interval | Difference) -> float | None:
    """Return half the width of the interval, 0 if it is only rounding; None without one."""
    if found.low is None or found.high is None:
        return None
    half = (found.high - found.low) / 2
    return 0.0 if is_negligible(half) else half


def is_negligible(value: float) -> bool:
    """Whether a difference or a width is what floats make of 0: 96.6 − 95.8 is not quite 0.8."""
    return abs(value) < NEGLIGIBLE


def format_p(p: float, level: float) -> str:
    """Format as 0.048 or "< 0.001"; rounding never moves p across the threshold."""
    if p < 0.001:
        return "< 0.001"
    threshold = 1 - level
    for digits in range(2, 17):
        text = f"{p:.{digits}g}"
        if (float(text) < threshold) == (p < threshold):
            break
    return text
