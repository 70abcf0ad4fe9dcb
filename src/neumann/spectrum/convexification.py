"""The paper's coefficients μ and η, which make an indefinite Hessian convex.

For a Hessian with eigenvalues between λ_min and λ_max > 0,

    μ = λ_max / (|λ_min| + λ_max),   η = 1/λ_max,   B̂ = (1 − μ)·I + μη·∇²ĝ

An eigenvalue λ of the Hessian becomes 1 − μ + μηλ of B̂. λ_max becomes 1. A negative λ_min becomes
exactly 0, so B̂ is positive definite only if the numbers given lie outside of the spectrum, which
the errors of `extremes` see to: `coefficients(*extremes(operator).outside)`. λ_min ≥ 0 becomes
2λ_min/(λ_min + λ_max).

How it fails: values inside the spectrum, such as Ritz values or the ends after ten Lanczos steps,
leave B̂ with negative eigenvalues, and the series of B̂ diverges.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Convexification:
    """μ, η, and the spectrum of B̂."""

    momentum: float  # μ, between 0 and 1
    lr: float  # η, in units of 1/λ
    lowest: float  # the eigenvalue of B̂ that λ_min becomes; 0 where λ_min < 0
    highest: float  # the one that λ_max becomes: 1
    condition: float  # highest/lowest; infinite where the lowest is 0


def coefficients(lambda_min: float, lambda_max: float) -> Convexification:
    """μ and η for a Hessian with eigenvalues from λ_min to λ_max, and what B̂'s become."""
    if not (math.isfinite(lambda_min) and math.isfinite(lambda_max)):
        raise ValueError(
            f"lambda_min and lambda_max must be finite, got {lambda_min!r} and {lambda_max!r}"
        )
    if not lambda_max > 0:
        raise ValueError(
            f"lambda_max must be above 0, got {lambda_max!r}; a Hessian without positive curvature "
            "has no learning rate 1/λ_max"
        )
    if lambda_min > lambda_max:
        raise ValueError(
            f"lambda_min must not be above lambda_max, got {lambda_min!r} and {lambda_max!r}"
        )
    spread = abs(lambda_min) + lambda_max
    # 1 − μ + μηλ_min, without the cancellation: |λ_min| + λ_min is exact.
    lowest = (abs(lambda_min) + lambda_min) / spread
    return Convexification(
        momentum=lambda_max / spread,
        lr=1 / lambda_max,
        lowest=lowest,
        highest=1.0,
        condition=1 / lowest if lowest > 0 else math.inf,
    )
