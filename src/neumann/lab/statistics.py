"""What a comparison of two optimizers over a few seeds can and cannot say.

Means come with Student's t interval, mean ± t·s/√n. Two arms are compared over the seeds that both
of them ran, by the paired t test: the differences of a seed's two results, which share their
initialisation and data order, against zero.

Runs that diverged (NaN or infinite) have no number to average. They are left out and counted, and
every sentence made here names them. Two seeds can still be a wide interval; one has none (None).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# Untyped upstream; the second code is for where stubs are installed.
from scipy import special  # type: ignore[import-untyped, unused-ignore]

FEW = 5  # fewer seeds than this are called few


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, in the unit of the values."""

    mean: float | None  # None if no run has a value
    low: float | None  # None with fewer than two values
    high: float | None
    n: int  # runs that went in
    diverged: int = 0  # runs left out: their value was not finite
    level: float = 0.95  # confidence


@dataclass(frozen=True)
class Difference:
    """The mean of a − b over common seeds, in the unit of the values."""

    mean: float | None  # None if there is no pair
    low: float | None  # None with fewer than two pairs
    high: float | None
    p: float | None  # two-sided; also None if all pairs differ by the same amount, not zero
    n: int  # pairs that went in
    diverged_a: int = 0  # pairs left out since a diverged
    diverged_b: int = 0  # pairs left out since b diverged; both may have
    pairs: int = 0  # seeds in common, those left out included
    level: float = 0.95  # confidence


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """The mean of the finite values and its confidence interval."""
    _check_level(level)
    finite = [float(value) for value in values if math.isfinite(value)]
    mean, low, high = _interval(finite, level)
    return Interval(mean, low, high, len(finite), len(values) - len(finite), level)


def common_seeds(a: Mapping[int, float], b: Mapping[int, float]) -> tuple[list[float], list[float]]:
    """The results of both arms, given by seed, for the seeds that both ran: ready to be paired."""
    seeds = sorted(a.keys() & b.keys())
    return [a[seed] for seed in seeds], [b[seed] for seed in seeds]


def paired_difference(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> Difference:
    """The mean of a − b and the paired t test; a[i] and b[i] must be of the same seed.

    Pairs that are all equal have p = 1. Where all differ by one and the same amount, t is infinite
    because the spread is zero, not because the evidence is strong: p is None.
    """
    _check_level(level)
    if len(a) != len(b):
        raise ValueError(
            f"a and b must hold one value for each common seed; got {len(a)} and {len(b)} values"
        )
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if math.isfinite(x) and math.isfinite(y)]
    differences = [float(x) - float(y) for x, y in pairs]
    mean, low, high = _interval(differences, level)
    return Difference(
        mean,
        low,
        high,
        _p(differences, max((abs(value) for pair in pairs for value in pair), default=0.0)),
        len(pairs),
        sum(not math.isfinite(x) for x in a),
        sum(not math.isfinite(y) for y in b),
        len(a),
        level,
    )


def steps_to_target(
    curve: Iterable[tuple[int, float]], target: float, *, lower_is_better: bool = False
) -> int | None:
    """The step (or epoch) of the first evaluation that reaches the target; None if none does.

    Args:
        curve: (step, value) of each evaluation, in the order of the run.
        target: in the unit of the values.
        lower_is_better: for a loss.
    """
    for step, value in curve:
        # NaN compares as False, so it reaches nothing.
        if value <= target if lower_is_better else value >= target:
            return step
    return None


def verdict(
    name_a: str,
    name_b: str,
    difference: Difference,
    unit: str = "points",
    *,
    lower_is_better: bool = False,
) -> str:
    """What paired_difference(a, b) says, in a sentence."""
    sentence = _finding(name_a, name_b, difference, unit, lower_is_better)
    failures = [
        f"{name} diverged in {count} of {difference.pairs} runs"
        for name, count in ((name_a, difference.diverged_a), (name_b, difference.diverged_b))
        if count
    ]
    if not failures:
        return sentence
    kept = "no seed is left to compare" if difference.n == 0 else f"over the others {sentence}"
    return f"{' and '.join(failures)}; {kept}"


def _finding(a: str, b: str, difference: Difference, unit: str, lower_is_better: bool) -> str:
    mean, n = difference.mean, difference.n
    if mean is None:
        return f"{a} and {b} cannot be compared: they have no seed in common"
    place = "ahead of" if (mean > 0) != lower_is_better else "behind"
    if mean == 0 and difference.low == difference.high:
        return f"{a} and {b} are equal in {_seeds(n)}"
    if difference.low is None or difference.high is None:
        return (
            f"{a} is {place} {b} by {_amount(abs(mean))} {unit} on one seed, "
            "which tells nothing about chance (n = 1)"
        )
    if difference.p is None:
        return (
            f"{a} is {place} {b} by the same {_amount(abs(mean))} {unit} in {_seeds(n)}; without "
            f"any spread this cannot be tested (n = {n})"
        )
    half = (difference.high - difference.low) / 2
    few = f", only {n} seeds" if n < FEW else ""
    evidence = f"(n = {n}, p {_p_text(difference.p, 1 - difference.level)}{few})"
    if difference.p < 1 - difference.level:
        size = f"{_amount(abs(mean), half)} ± {_amount(half, half)} {unit}"
        return f"{a} is {place} {b} by {size} {evidence}"
    size = f"{_amount(mean, half)} ± {_amount(half, half)} {unit}"
    return f"no difference between {a} and {b} can be told from chance: {size} {evidence}"


def _interval(
    values: Sequence[float], level: float
) -> tuple[float | None, float | None, float | None]:
    n = len(values)
    if n == 0:
        return None, None, None
    mean, error = _moments(values)
    if n == 1:
        return mean, None, None
    half = float(special.stdtrit(n - 1, (1 + level) / 2)) * error
    return mean, mean - half, mean + half


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error (0 for one value)."""
    n = len(values)
    # Losses shortly before they overflow must not overflow here; hypot does not either.
    try:
        mean = math.fsum(values) / n
    except OverflowError:
        mean = math.fsum(value / n for value in values)
    # Rounding takes the mean of equal values past them.
    mean = min(max(mean, min(values)), max(values))
    spread = math.hypot(*(value - mean for value in values))
    return mean, spread / math.sqrt(n * max(n - 1, 1))


def _p(differences: Sequence[float], largest: float) -> float | None:
    """Two-sided; `largest` is the largest of the values whose differences these are."""
    n = len(differences)
    if n < 2:
        return None
    if not any(differences):
        return 1.0
    # 0.3 − 0.2 and 0.2 − 0.1 differ by rounding alone: that is no spread.
    if max(differences) - min(differences) <= 8 * math.ulp(largest):
        return None
    mean, error = _moments(differences)
    return 2 * float(special.stdtr(n - 1, -abs(mean / error)))


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, such as 0.95; got {level}")


def _seeds(n: int) -> str:
    return "the one seed they share" if n == 1 else f"each of {n} seeds"


def _amount(value: float, half: float | None = None) -> str:
    """With two digits of the interval's half-width, or of the value itself, and at most all."""
    scale = abs(value) if half is None else half
    if scale >= 1e6:
        return f"{value:.3g}"
    digits = 2 if scale == 0 else min(max(1 - math.floor(math.log10(scale)), 0), 15)
    # Adding zero makes −0 a plain 0.
    return f"{round(value, digits) + 0.0:.{digits}f}"


def _p_text(p: float, threshold: float) -> str:
    if p < 0.001:
        return "< 0.001"
    # Rounding must not put it on the other side of what the sentence says.
    for digits in range(2, 17):
        text = f"{p:.{digits}g}"
        if (float(text) < threshold) == (p < threshold):
            break
    return f"= {text}"
