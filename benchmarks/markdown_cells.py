"""Cells and lines of the Markdown tables that benchmarks print; what is not there is empty."""

from collections.abc import Sequence
from typing import Any


def line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def cell(value: Any, form: str) -> str:
    """The value in a format such as "{:.2f}"."""
    return "" if value is None else form.format(value)


def difference(mean: float | None, low: float | None, high: float | None, digits: int = 2) -> str:
    """With its interval, and minus signs; empty where there is none."""
    if mean is None or low is None or high is None:
        return ""
    return f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]".replace("-", "−")
