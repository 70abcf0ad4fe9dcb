"""What a comparison has found, in sentences, for the terminal and the report.

A sentence names the number of seeds, and every run that diverged.
"""

from typing import NamedTuple

from neumann.lab.metrics import ACCURACY, Metric
from neumann.lab.studies.rounding import choose_rounding, format_p, half_width, is_negligible
from neumann.lab.studies.statistics import Difference

FEW_SEEDS = 5  # fewer than this are pointed out
CORRECTED = (
    "p values are corrected for multiple comparisons by Holm's method; intervals are those of each "
    "comparison alone"
)


class LongWarmup(NamedTuple):
    """A warm-up that leaves the Neumann iteration less than half of a run."""

    steps: int
    total: int  # steps of the run


def describe_warmup_of_arm(arm: str, warmup: LongWarmup) -> str:
    steps, total = warmup
    if steps == total:
        return f"{arm}: all {steps} steps were its SGD warm-up; the Neumann iteration never began"
    return f"{arm}: {steps} of {total} steps were its SGD warm-up; lower warmup_epochs"


def describe_difference(a: str, b: str, difference: Difference, metric: Metric = ACCURACY) -> str:
    """Describe in one sentence by how much a is better than b, in percentage points or nats."""
    sentence = _describe_pairs(a, b, difference, metric)
    failures = [
        f"{name} diverged in {count} of {difference.pairs} runs"
        for name, count in ((a, difference.diverged_a), (b, difference.diverged_b))
        if count
    ]
    if not failures:
        return sentence
    rest = "no seed is left to compare" if difference.n == 0 else f"in the others, {sentence}"
    return f"{' and '.join(failures)}; {rest}"


def _describe_pairs(a: str, b: str, difference: Difference, metric: Metric) -> str:
    """Describe the seeds in which neither arm diverged."""
    mean, n, half = difference.mean, difference.n, half_width(difference)
    unit, rounding = metric.difference_unit, choose_rounding(difference, metric)
    if mean is None:
        return f"{a} and {b} cannot be compared: they have no seed in common"
    if is_negligible(mean) and not half:
        seeds = "the one seed they share" if n == 1 else f"each of {n} seeds"
        return f"{a} and {b} are equal in {seeds}"
    place = "ahead of" if mean > 0 else "behind"
    ahead, size = f"{a} is {place} {b} by", f"{rounding.format(abs(mean))} {unit}"
    if half is None:
        return f"{ahead} {size}, but one seed is too few to test this (n = 1)"
    if difference.p is None:
        untested = f"with no spread there is nothing to test (n = {n})"
        return f"{ahead} the same {size} in each of {n} seeds; {untested}"
    if not difference.is_clear:
        ahead = f"no clear difference between {a} and {b}:"
    else:
        mean = abs(mean)
    few = f", only {n} seeds" if n < FEW_SEEDS else ""
    p = format_p(difference.p, difference.level)
    evidence = f"(n = {n}, p {p if p.startswith('<') else f'= {p}'}{few})"
    return f"{ahead} {rounding.format(mean)} ± {rounding.format(half)} {unit} {evidence}"
