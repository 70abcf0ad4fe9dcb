"""Student t intervals of means over a few seeds, and paired t tests of two arms.

The two runs of a seed share their initialization and data order, so their differences are tested
against zero. A run that diverged (NaN or infinite) is left out and counted. A single seed gives no
interval (None).
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Interval:
    """The mean of some runs, in the unit of the values."""

    mean: float | None  # None without any finite value
    low: float | None  # None with fewer than two values
    high: float | None
    n: int  # values that went in
    diverged: int = 0  # values left out because they were not finite
    level: float = 0.95  # confidence


@dataclass(frozen=True)
class Difference:
    """The mean of a − b over common seeds, in the unit of the values."""

    mean: float | None  # None without any pair
    low: float | None  # None with fewer than two pairs
    high: float | None
    p: float | None  # two-sided; also None if all pairs differ by the same amount, not zero
    n: int  # pairs that went in
    diverged_a: int = 0  # pairs left out because a diverged
    diverged_b: int = 0  # pairs left out because b diverged; both may have
    pairs: int = 0  # common seeds, including those left out
    level: float = 0.95  # confidence

    @property
    def is_clear(self) -> bool:
        """Whether a test was possible, and chance alone would rarely give such a difference."""
        return self.p is not None and self.p < 1 - self.level


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    finite = [float(value) for value in values if math.isfinite(value)]
    mean, low, high, _ = _t_test(finite, level)
    return Interval(mean, low, high, len(finite), len(values) - len(finite), level)


def select_common_seeds(
    a: Mapping[int, float], b: Mapping[int, float]
) -> tuple[list[float], list[float]]:
    """Select the results, keyed by seed, of the seeds that both arms ran, in the same order."""
    seeds = sorted(a.keys() & b.keys())
    return [a[seed] for seed in seeds], [b[seed] for seed in seeds]


def paired_difference(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> Difference:
    """The mean of a − b and the paired t test; a[i] and b[i] must come from the same seed.

    If all pairs are equal, p is 1. If all pairs differ by one and the same amount, t is infinite
    only because the spread is zero, which is no evidence: p is None.
    """
    if len(a) != len(b):
        raise ValueError(
            f"a and b must hold one value for each common seed; got {len(a)} and {len(b)} values"
        )
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if math.isfinite(x) and math.isfinite(y)]
    differences = [float(x) - float(y) for x, y in pairs]
    mean, low, high, p = _t_test(differences, level)
    if p is not None and any(differences):
        # 0.3 − 0.2 and 0.2 − 0.1 differ only by rounding: that is no spread.
        rounding = 8 * math.ulp(max(abs(value) for pair in pairs for value in pair))
        if max(differences) - min(differences) <= rounding:
            p = None
    diverged_a, diverged_b = (sum(not math.isfinite(x) for x in values) for values in (a, b))
    return Difference(mean, low, high, p, len(pairs), diverged_a, diverged_b, len(a), level)


def correct_by_holm(p_values: Sequence[float]) -> list[float]:
    """p values corrected for testing several hypotheses at once, by the method of Holm (1979)."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, (len(p_values) - rank) * p_values[index])
        corrected[index] = min(largest, 1.0)
    return corrected


def correct_differences(found: Sequence[Difference | None]) -> list[Difference | None]:
    """Return the same differences with p values corrected for how many of them were tested."""
    tested = [each.p for each in found if each is not None and each.p is not None]
    corrected = iter(correct_by_holm(tested))
    return [
        each if each is None or each.p is None else replace(each, p=next(corrected))
        for each in found
    ]


def _t_test(
    values: Sequence[float], level: float
) -> tuple[float | None, float | None, float | None, float | None]:
    """The mean, its confidence interval, and the p value of the t test against zero."""
    from scipy import stats  # type: ignore[import-untyped, unused-ignore]  # takes a second

    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, such as 0.95; got {level}")
    if not values:
        return None, None, None, None
    # Scaling by a power of two is exact, and keeps values near the largest float from overflowing.
    scale = math.ldexp(1.0, min(math.frexp(max(map(abs, values)))[1], 1023))
    scaled = [value / scale for value in values]
    mean = math.fsum(scaled) / len(scaled) * scale
    mean = min(max(mean, min(values)), max(values))  # rounding must not push it outside
    if len(values) == 1:
        return mean, None, None, None
    if min(values) == max(values):
        return mean, mean, mean, None if any(values) else 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # about values that are almost equal
        test = stats.ttest_1samp(scaled, 0.0)
        interval = test.confidence_interval(level)
    return mean, float(interval.low) * scale, float(interval.high) * scale, float(test.pvalue)
