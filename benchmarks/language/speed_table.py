"""Tokens per second of the arms of the language contest, as a table.

An arm is timed with slow momentum if its best setting in the contest has it.
"""

import contextlib
from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.common.ledger import MissingRunError
from benchmarks.common.markdown import format_table
from benchmarks.language.contest_rules import LENGTHS, MIDDLE, MUON, OTHERS, OURS, ROWS
from benchmarks.language.contest_stages import LanguageContest
from benchmarks.language.contest_tables import NAMES

ARMS = (OURS, *MUON, ROWS, *OTHERS)
REFERENCE = "adamw"
# What measurements that do not record it had: ours, where its search in the contest starts.
EARLIER_SHARES = {OURS: 0.6}


def find_slow_shares(contest: LanguageContest) -> dict[str, float]:
    """The share of slow momentum in the best setting of those arms that have it."""
    shares = {}
    for arm in ARMS:
        with contextlib.suppress(MissingRunError):
            shares[arm] = contest.searches.rank_settings(arm, MIDDLE, LENGTHS[MIDDLE])[0].slow
    return {arm: share for arm, share in shares.items() if share}


def describe_speeds(measured: Mapping[str, Any], contest: LanguageContest) -> str:
    """The table, and what the measurement lacks."""
    speeds = measured["tokens_per_second"]
    timed, wanted = measured.get("slow", EARLIER_SHARES), find_slow_shares(contest)
    lines = [format_speeds(speeds)]
    if missing := [NAMES[arm] for arm in ARMS if arm not in speeds]:
        lines.append(f"Not measured: {', '.join(missing)}.")
    if without := [NAMES[arm] for arm in speeds if arm in wanted and not timed.get(arm)]:
        had = "Timed without the slow momentum that the best setting in the contest has"
        lines.append(f"{had}: {', '.join(without)}.")
    return "\n\n".join(lines)


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
