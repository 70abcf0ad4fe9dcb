"""Markdown tables. A missing value is an empty cell."""

from collections.abc import Iterable, Sequence
from typing import Any

RULES = {"l": "---", "r": "--:"}


def format_table(heads: Sequence[str], align: str, rows: Iterable[Sequence[str]]) -> str:
    """A table whose columns are aligned left ("l") or right ("r"), as in `align="lrr"`."""
    lines = [heads, [RULES[side] for side in align], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def format_cell(value: Any, form: str) -> str:
    """The value in a format such as "{:.2f}"."""
    return "" if value is None else form.format(value)


def format_difference(mean: Any, low: Any, high: Any, digits: int = 2) -> str:
    """A difference and its confidence interval, with typographic minus signs."""
    if None in (mean, low, high):
        return ""
    return f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]".replace("-", "−")
