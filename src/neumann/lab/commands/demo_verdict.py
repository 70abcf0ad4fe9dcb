"""The demo's result in one sentence, whatever it is.

The first arm is compared with each other one by a paired t test over the seeds, corrected by Holm's
method since there are several. What cannot be told from chance at the 5 % level is called a tie.
"""

from neumann.lab.report.formatting import format_list
from neumann.lab.studies.results import ArmResult, Comparison
from neumann.lab.studies.statistics import correct_by_holm

LEVEL = 0.05
EVIDENCE = (
    "Ahead and behind mean p < 0.05 in a paired t test over the seeds, with Holm's correction for "
    "several tests; anything else is a tie."
)


def state_verdict(comparison: Comparison, steps: int) -> str:
    """Say in one sentence which optimizers the first one is ahead of, ties with, or is behind."""
    first, *others = comparison.rows
    if comparison.seeds == 1:
        place = f"After {steps} steps {first.arm} {_describe_place(comparison)}"
        return f"{place}, but one seed says nothing about chance."
    p_values = _correct_p_values(others)
    groups: dict[str, list[str]] = {
        "is ahead of": [],
        "ties with": [],
        "is behind": [],
        "cannot be compared with": [],
    }
    for row in others:
        groups[_judge(row, p_values.get(row.arm))].append(row.arm)
    found = [f"{verb} {format_list(names)}" for verb, names in groups.items() if names]
    start = f"After {steps} steps and over {comparison.seeds} seeds, {first.arm}"
    return f"{start} {', and '.join(found)}{_describe_divergence(comparison)}."


def _correct_p_values(rows: list[ArmResult]) -> dict[str, float]:
    """The p values of the arms that could be tested."""
    found = {
        row.arm: row.difference.p
        for row in rows
        if row.difference is not None and row.difference.p is not None
    }
    return dict(zip(found, correct_by_holm(list(found.values())), strict=True))


def _judge(row: ArmResult, p: float | None) -> str:
    if p is None or row.difference is None or row.difference.mean is None:
        return "cannot be compared with"
    if p >= LEVEL:
        return "ties with"
    return "is ahead of" if row.difference.mean > 0 else "is behind"


def _describe_place(comparison: Comparison) -> str:
    """Where the first arm is among all; those that diverged are last."""
    worst = float("-inf")
    means = [row.score.mean for row in comparison.rows]
    own, *gains = [worst if m is None else comparison.metric.gain(m) for m in means]
    if own == worst:
        return "has diverged"
    place, shared = 1 + sum(gain > own for gain in gains), own in gains
    return f"{'shares' if shared else 'has'} place {place} of {len(means)}"


def _describe_divergence(comparison: Comparison) -> str:
    found = [
        f"{row.arm} diverged in {row.score.diverged} of {len(row.runs)} runs"
        for row in comparison.rows
        if row.score.diverged
    ]
    return f"; {format_list(found)}" if found else ""
