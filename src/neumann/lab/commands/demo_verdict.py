"""The demo's result in one sentence, whatever it is.

The comparison has tested the first arm against each other one. A difference that is not clear is
called a tie.
"""

from neumann.lab.report.formatting import format_list
from neumann.lab.studies.results import Comparison
from neumann.lab.studies.statistics import Difference

EVIDENCE = (
    "Ahead and behind mean p < 0.05 in a paired t test over the seeds, after Holm's correction for "
    "multiple tests. Anything else counts as a tie."
)
ORDINALS = {1: "1st", 2: "2nd", 3: "3rd"}


def state_verdict(comparison: Comparison, steps: int) -> str:
    """Say in one sentence which optimizers the first one is ahead of, ties with, or is behind."""
    first, *others = comparison.rows
    if comparison.seeds == 1:
        place = f"After {steps} steps, {first.arm} {_describe_place(comparison)}"
        return f"{place}. One seed is too few to test this."
    groups: dict[str, list[str]] = {
        "is ahead of": [],
        "ties with": [],
        "is behind": [],
        "cannot be compared with": [],
    }
    for row in others:
        groups[_judge(row.difference)].append(row.arm)
    found = [f"{verb} {format_list(names)}" for verb, names in groups.items() if names]
    start = f"After {steps} steps and over {comparison.seeds} seeds, {first.arm}"
    found[-1] = f"and {found[-1]}" if len(found) > 1 else found[-1]
    return f"{start} {', '.join(found)}{_describe_divergence(comparison)}."


def _judge(found: Difference | None) -> str:
    if found is None or found.p is None or found.mean is None:
        return "cannot be compared with"
    if not found.is_clear:
        return "ties with"
    return "is ahead of" if found.mean > 0 else "is behind"


def _describe_place(comparison: Comparison) -> str:
    """Where the first arm is among all; those that diverged are last."""
    worst = float("-inf")
    means = [row.score.mean for row in comparison.rows]
    own, *gains = [worst if m is None else comparison.metric.gain(m) for m in means]
    if own == worst:
        return "diverged"
    place = 1 + sum(gain > own for gain in gains)
    ordinal = ORDINALS.get(place, f"{place}th")
    return f"is {'joint ' if own in gains else ''}{ordinal} of {len(means)}"


def _describe_divergence(comparison: Comparison) -> str:
    found = [
        f"{row.arm} diverged in {row.score.diverged} of {len(row.runs)} runs"
        for row in comparison.rows
        if row.score.diverged
    ]
    return f"; {format_list(found)}" if found else ""
