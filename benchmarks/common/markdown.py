"""Markdown tables. A missing value is an empty cell."""

from collections.abc import Iterable, Sequence
from typing import Any

RULES = {"l": "---", "r": "--:"}


def format_table(heads: Sequence[str], align: str, rows: Iterable[Sequence[str]]) -> str:
    """A table whose columns are aligned left ("l") or right ("r"), as in `align="lrr"`.

    The cells that a row lacks at its end are empty.
    """
    padded = ([*row, *[""] * (len(heads) - len(row))] for row in rows)
    lines = [heads, [RULES[side] for side in align], *padded]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def format_cell(value: Any, form: str) -> str:
    """The value in a format such as "{:.2f}"."""
    return "" if value is None else form.format(value)


def format_difference(mean: Any, low: Any, high: Any, digits: int = 2) -> str:
    """A difference and its confidence interval, with typographic minus signs."""
    if None in (mean, low, high):
        return ""
    return f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]".replace("-", "−")
