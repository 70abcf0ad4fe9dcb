"""What a comparison has found, in sentences, for the terminal and the report.

A sentence names the number of seeds, and every run that diverged.
"""

import math
from typing import NamedTuple

from neumann.lab.studies.statistics import Difference

FEW_SEEDS = 5  # fewer than this are pointed out
UNCORRECTED = "p values are not corrected for multiple comparisons"


class LongWarmup(NamedTuple):
    """A warm-up that leaves the Neumann iteration less than half of a run."""

    steps: int
    total: int  # steps of the run


def describe_long_warmup(arm: str, warmup: LongWarmup) -> str:
    steps, total = warmup
    if steps == total:
        return f"{arm}: all {steps} steps were its SGD warm-up; the Neumann iteration never began"
    return f"{arm}: {steps} of {total} steps were its SGD warm-up; lower warmup_epochs"


def describe_difference(a: str, b: str, difference: Difference, unit: str = "points") -> str:
    """Describe in one sentence by how much a is better than b, in percentage points or nats."""
    sentence = _describe_pairs(a, b, difference, unit)
    failures = [
        f"{name} diverged in {count} of {difference.pairs} runs"
        for name, count in ((a, difference.diverged_a), (b, difference.diverged_b))
        if count
    ]
    if not failures:
        return sentence
    rest = "no seed is left to compare" if difference.n == 0 else f"over the others {sentence}"
    return f"{' and '.join(failures)}; {rest}"


def _describe_pairs(a: str, b: str, difference: Difference, unit: str) -> str:
    """Describe the seeds in which neither arm diverged."""
    mean, n = difference.mean, difference.n
    if mean is None:
        return f"{a} and {b} cannot be compared: they have no seed in common"
    if mean == 0 and difference.low == difference.high:
        seeds = "the one seed they share" if n == 1 else f"each of {n} seeds"
        return f"{a} and {b} are equal in {seeds}"
    place = "ahead of" if mean > 0 else "behind"
    ahead, size = f"{a} is {place} {b} by", f"{_format(abs(mean))} {unit}"
    if difference.low is None or difference.high is None:
        return f"{ahead} {size} on one seed, which says nothing about chance (n = 1)"
    if difference.p is None:
        untested = f"without any spread this cannot be tested (n = {n})"
        return f"{ahead} the same {size} in each of {n} seeds; {untested}"
    threshold, half = 1 - difference.level, (difference.high - difference.low) / 2
    if difference.p >= threshold:
        ahead = f"no difference between {a} and {b} can be told from chance:"
    else:
        mean = abs(mean)
    few = f", only {n} seeds" if n < FEW_SEEDS else ""
    evidence = f"(n = {n}, p {_format_p(difference.p, threshold)}{few})"
    return f"{ahead} {_format(mean, half)} ± {_format(half, half)} {unit} {evidence}"


def _format(value: float, half: float | None = None) -> str:
    """Two significant digits of the interval's half-width, or of the value itself."""
    scale = abs(value) if half is None else half
    if scale >= 1e6:
        return f"{value:.3g}"
    digits = 2 if scale == 0 else min(max(1 - math.floor(math.log10(scale)), 0), 15)
    return f"{round(value, digits) + 0.0:.{digits}f}"  # adding zero turns −0 into 0


def _format_p(p: float, threshold: float) -> str:
    if p < 0.001:
        return "< 0.001"
    # Rounding must not move p to the other side of the threshold.
    for digits in range(2, 17):
        text = f"{p:.{digits}g}"
        if (float(text) < threshold) == (p < threshold):
            break
    return f"= {text}"
