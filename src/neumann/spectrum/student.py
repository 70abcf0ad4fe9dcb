"""Quantiles of Student's t distribution, for intervals around a mean of few samples.

With ν degrees of freedom and θ = atan(t/√ν), the probability of |T| ≤ t is a finite sum:

    ν odd:   (2/π)·(θ + sin θ·(cos θ + ⅔cos³θ + (2·4)/(3·5)·cos⁵θ + … up to cos^{ν−2}θ))
    ν even:  sin θ·(1 + ½cos²θ + (1·3)/(2·4)·cos⁴θ + … up to cos^{ν−2}θ)
"""

import math


def within(t: float, freedom: int) -> float:
    """The probability of |T| ≤ t."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * cosine**2
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def quantile(probability: float, freedom: int) -> float:
    """The t below which T stays with this probability, from 1/2 to below 1."""
    if not 0.5 <= probability < 1 or freedom < 1:
        raise ValueError(
            "probability must be from 0.5 to below 1 and freedom from 1, got "
            f"{probability!r} and {freedom!r}"
        )
    low, high = 0.0, 1.0
    while within(high, freedom) < 2 * probability - 1:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if within(middle, freedom) < 2 * probability - 1:
            low = middle
        else:
            high = middle
    return high
