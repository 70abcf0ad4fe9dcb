"""Tokens per second of the arms of the language contest, as a table."""

from statistics import median

from benchmarks.common.markdown import format_table
from benchmarks.language.contest_tables import NAMES

REFERENCE = "adamw"


def find_ratios(speeds: dict[str, list[float]]) -> dict[str, float]:
    """Each arm's speed as a share of AdamW's: the median over rounds."""
    return {
        arm: median(own / other for own, other in zip(found, speeds[REFERENCE], strict=True))
        for arm, found in speeds.items()
    }


def format_speeds(speeds: dict[str, list[float]]) -> str:
    ratios = find_ratios(speeds)
    rows = [(NAMES[arm], f"{median(speeds[arm]):,.0f}", f"{ratios[arm]:.3f}") for arm in speeds]
    return format_table(("arm", "tokens per second", "of AdamW's"), "lrr", rows)
