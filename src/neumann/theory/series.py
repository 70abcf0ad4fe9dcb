"""The Neumann series: solve A·x = b using only products with A.

The paper's A⁻¹ = Σ (I − A)ⁱ, with a step size s and a preconditioner P, summed term by term:

    x_{k+1} = x_k + s·P(b − A·x_k)        x₀ = 0:  x_k = Σ_{i<k} (I − s·PA)ⁱ s·P·b

This is Richardson's iteration. P = I and s = 1 give the paper's equation, P = I and s = η its inner
loop. The residual r = b − A·x satisfies r_{k+1} = (I − s·AP)·r_k, and AP has the same eigenvalues
as PA. So the series converges for every b if and only if every eigenvalue λ of s·PA satisfies
|1 − λ| < 1. For symmetric A and positive definite P that means: all of them lie in (0, 2).

How it fails: if an eigenvalue of s·PA is 2 or more (s is too large) or negative (A is indefinite),
the residual grows geometrically, and ``SeriesDiverged`` says which of the two it is and what to do.
If the growth is too slow for ``max_terms``, an eigenvalue is 0, or PA is ill-conditioned (a term
shrinks the error by 1 − 1/κ at best), the result has ``converged=False``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from neumann.validation import require, require_integer

__all__ = ["SeriesDiverged", "SeriesSolution", "solve"]

Operator = Callable[[Tensor], Tensor]

# With symmetric A and positive definite P, ‖r‖ of a convergent series can grow by up to √κ(P), as
# rᵀPr is what shrinks steadily. A factor of 1000 allows κ(P) = 10⁶, and after that much growth one
# eigenvector dominates enough to be identified.
GROWTH_LIMIT = 1e3


class SeriesDiverged(RuntimeError):
    """The series diverges; the message names the eigenvalue bound that is violated."""


@dataclass(frozen=True)
class SeriesSolution:
    """The sum, and how it was reached."""

    solution: Tensor  # shape, dtype and device of b
    residuals: tuple[float, ...]  # ‖b − A·x_k‖ / ‖b‖ for k = 0 … terms
    terms: int  # terms summed, one product with A each
    converged: bool  # the last residual is within the tolerance


def solve(
    matvec: Operator,
    b: Tensor,
    *,
    scale: float = 1.0,
    preconditioner: Operator | None = None,
    tolerance: float = 1e-5,
    max_terms: int = 1000,
    start: Tensor | None = None,
) -> SeriesSolution:
    """Sum the series for A·x = b until ‖b − A·x‖ ≤ ``tolerance``·‖b‖, or for ``max_terms`` terms.

    Args:
        matvec: A, a linear map between tensors shaped like b.
        b: of any shape; norms and inner products run over all its elements.
        scale: s, which should be about 1/λ_max(PA).
        preconditioner: P, a linear map like ``matvec``; the identity by default.
        tolerance: the relative residual at which the sum ends.
        max_terms: the most terms to sum.
        start: x₀, zero by default.

    Raises:
        SeriesDiverged: the residual grew a thousandfold, or is not finite.
    """
    _check(b, scale, tolerance, max_terms, start)
    b = b.detach()
    b_norm = _norm(b)
    if b_norm == 0:
        return SeriesSolution(torch.zeros_like(b), residuals=(0.0,), terms=0, converged=True)

    if start is None:
        solution, residual = torch.zeros_like(b), b
    else:
        solution = start.detach().clone()
        residual = b - _apply("matvec", matvec, solution)
    residuals = [_finite(_norm(residual) / b_norm, term=0)]
    # A residual below eps is rounding error, and a ratio to it means nothing.
    floor = torch.finfo(b.dtype).eps
    best = max(residuals[0], floor)

    while residuals[-1] > tolerance and len(residuals) <= max_terms:
        direction = _apply("preconditioner", preconditioner, residual)
        solution = solution + scale * direction
        residual = b - _apply("matvec", matvec, solution)
        residuals.append(_finite(_norm(residual) / b_norm, term=len(residuals)))
        if residuals[-1] > GROWTH_LIMIT * best:
            direction = _apply("preconditioner", preconditioner, residual)
            image = scale * _apply("matvec", matvec, direction)
            raise SeriesDiverged(
                f"the series diverges: at term {len(residuals) - 1} the residual is "
                f"{residuals[-1] / best:.3g} times its smallest value. "
                + _violated_bound(residual, image, scale)
            )
        best = min(best, max(residuals[-1], floor))

    converged = residuals[-1] <= tolerance
    return SeriesSolution(solution, tuple(residuals), len(residuals) - 1, converged)


def _violated_bound(residual: Tensor, image: Tensor, scale: float) -> str:
    """Say which bound is violated, from a residual r that has grown and its image s·AP·r."""
    residual, image = residual.double(), image.double()
    squared = (residual * residual).sum().item()
    # By now r is almost an eigenvector: its Rayleigh quotient is the eigenvalue that made it grow.
    eigenvalue = (residual * image).sum().item() / squared
    if eigenvalue >= 2:
        return (
            f"An eigenvalue of scale·PA is about {eigenvalue:.4g}, and all must be below 2: scale "
            f"must be below {2 * scale / eigenvalue:.4g}, and 1/λ_max = {scale / eigenvalue:.4g} "
            f"is a good choice (scale is now {scale:.4g})"
        )
    if eigenvalue <= 0:
        return (
            f"An eigenvalue of scale·PA is about {eigenvalue:.4g}, and all must be above 0: A is "
            f"not positive definite (PA has an eigenvalue of about {eigenvalue / scale:.4g}), and "
            "no scale helps. Solve with the convexified B̂ = (1−μ)·I + μ·η·A instead of A, where "
            "η = 1/λ_max and μ = λ_max/(|λ_min| + λ_max) from bounds just outside A's eigenvalues"
        )
    factor = _norm(residual - image) / math.sqrt(squared)
    return (
        f"The residual grows by a factor of {factor:.4g} per term although its Rayleigh quotient "
        f"{eigenvalue:.4g} lies in (0, 2): scale·PA has eigenvalues on both sides of (0, 2), or "
        "complex ones (A is not symmetric, or P is not symmetric positive definite)"
    )


def _norm(vector: Tensor) -> float:
    # In float64, where the squares of float32 numbers neither overflow nor underflow.
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))


def _finite(relative: float, term: int) -> float:
    if not math.isfinite(relative):
        raise SeriesDiverged(
            f"the residual is not finite at term {term}: matvec or preconditioner returned NaN "
            "or infinity, or the products overflow (an eigenvalue of scale·PA far above 2)"
        )
    return relative


def _apply(name: str, operator: Operator | None, vector: Tensor) -> Tensor:
    if operator is None:
        return vector
    # No torch.no_grad() here: the operator may differentiate to compute its product.
    result = operator(vector).detach()
    if result.shape != vector.shape or result.dtype != vector.dtype:
        raise ValueError(
            f"{name} returned shape {tuple(result.shape)} and {result.dtype} for a vector of shape "
            f"{tuple(vector.shape)} and {vector.dtype}; both must stay the same"
        )
    return result


def _check(b: Tensor, scale: float, tolerance: float, max_terms: int, start: Tensor | None) -> None:
    if b.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"b must be float32 or float64, got {b.dtype}")
    if not torch.isfinite(b).all():
        raise ValueError("b must be finite, but contains NaN or infinity")
    require(math.isfinite(scale) and scale > 0, "scale", scale, "finite and above 0")
    good = math.isfinite(tolerance) and tolerance >= 0
    require(good, "tolerance", tolerance, "finite and at least 0")
    require_integer("max_terms", max_terms, least=1)
    if start is not None:
        given, wanted = ((tuple(t.shape), t.dtype, t.device) for t in (start, b))
        require(given == wanted, "start", given, f"like b, {wanted}")
        if not torch.isfinite(start).all():
            raise ValueError("start must be finite, but contains NaN or infinity")
