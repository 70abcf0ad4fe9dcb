"""The paper's coefficients μ and η, which make an indefinite Hessian convex.

    μ = λ_max / (|λ_min| + λ_max),   η = 1/λ_max,   B̂ = (1 − μ)·I + μη·∇²ĝ

λ_max becomes 1 in B̂, a negative λ_min becomes 0, and a λ_min ≥ 0 becomes 2λ_min/(λ_min + λ_max).
So B̂ is positive definite only if the two numbers lie strictly outside the spectrum: call
`coefficients(*extremes(operator).outside)`. With values inside, such as Ritz values or the ends
after ten Lanczos steps, B̂ keeps negative eigenvalues and its series diverges.
"""

import math
from dataclasses import dataclass

from neumann.validation import require


@dataclass(frozen=True)
class Convexification:
    """μ, η, and the spectrum of B̂."""

    momentum: float  # μ, between 0 and 1
    lr: float  # η, in units of 1/λ
    lowest: float  # the eigenvalue of B̂ that λ_min becomes; 0 if λ_min < 0
    highest: float  # the eigenvalue that λ_max becomes: 1
    condition: float  # highest/lowest; infinite if the lowest is 0


def coefficients(lambda_min: float, lambda_max: float) -> Convexification:
    """Compute μ and η for a Hessian with eigenvalues from λ_min to λ_max.

    Raises:
        ValueError: a value is not finite, λ_max is not positive, or λ_min exceeds λ_max.
    """
    for name, value in (("lambda_min", lambda_min), ("lambda_max", lambda_max)):
        require(math.isfinite(value), name, value, "finite")
    require(lambda_max > 0, "lambda_max", lambda_max, "above 0 for a learning rate of 1/λ_max")
    require(lambda_min <= lambda_max, "lambda_min", lambda_min, f"at most {lambda_max!r}")
    spread = abs(lambda_min) + lambda_max
    # 1 − μ + μηλ_min without its cancellation: |λ_min| + λ_min is exact.
    lowest = (abs(lambda_min) + lambda_min) / spread
    condition = 1 / lowest if lowest > 0 else math.inf
    return Convexification(lambda_max / spread, 1 / lambda_max, lowest, 1.0, condition)
