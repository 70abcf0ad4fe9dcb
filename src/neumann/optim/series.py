"""The Neumann series: solve A·x = b from products with A alone.

The paper's A⁻¹ = Σ (I − A)ⁱ, with a step size s and a preconditioner P, summed term by term:

    x_{k+1} = x_k + s·P(b − A·x_k)        x₀ = 0:  x_k = Σ_{i<k} (I − s·PA)ⁱ s·P·b

which is Richardson's iteration. P = I and s = 1 is the paper's equation, P = I and s = η its inner
loop. The residual obeys r_{k+1} = (I − s·AP)·r_k, and AP has the eigenvalues of PA, so the series
converges for every b if and only if every eigenvalue λ of s·PA has |1 − λ| < 1: for symmetric A
and positive definite P, if and only if all of them lie in (0, 2).

How it fails:

- An eigenvalue of s·PA of 2 or more (s too large), or below 0 (A indefinite): the residual grows
  geometrically. ``SeriesDiverged`` says which, and what to do. It is raised once the growth is
  plain; growth too slow to show within ``max_terms`` gives ``converged=False``.
- An eigenvalue of 0 with a component of b along it: there is no solution, the residual stays where
  it is, and the answer is ``converged=False``.
- An ill-conditioned PA: the error shrinks by 1 − 1/κ a term at best with s = 1/λ_max. A tolerance
  below what the dtype can hold (about κ·eps) is never reached.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SeriesDiverged", "SeriesSolution", "solve"]

Operator = Callable[[Tensor], Tensor]

# In a convergent series with P = I and symmetric A the residual never grows, but ‖r‖ may grow for a
# while when AP is not normal: for a symmetric A and a positive definite P by up to √κ(P), since it
# is rᵀPr that shrinks steadily. A thousandfold leaves room for κ(P) = 10⁶, and by then the growing
# eigenvector outweighs all others enough to be named.
GROWTH_LIMIT = 1e3


class SeriesDiverged(RuntimeError):
    """The series has no sum; the message names the eigenvalue bound that does not hold."""


@dataclass(frozen=True)
class SeriesSolution:
    solution: Tensor  # shape, dtype and device of b
    residuals: tuple[float, ...]  # ‖b − A·x_k‖ / ‖b‖ for k = 0 … terms
    terms: int  # terms summed; each cost one product with A
    converged: bool  # whether the last residual is within the tolerance


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

    ``matvec`` and ``preconditioner`` map a tensor shaped like b to another and must be linear. b
    may have any shape; norms and inner products are over all its elements. ``scale`` is s and
    should be about 1/λ_max(PA). ``start`` is x₀, zero unless given.
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
    # Below eps a residual is rounding error, and a ratio to it would mean nothing.
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

    return SeriesSolution(
        solution,
        residuals=tuple(residuals),
        terms=len(residuals) - 1,
        converged=residuals[-1] <= tolerance,
    )


def _violated_bound(residual: Tensor, image: Tensor, scale: float) -> str:
    """Which bound fails, from a grown residual r and its image s·AP·r.

    After its growth r is all but an eigenvector, so that its Rayleigh quotient ⟨r, s·AP·r⟩/⟨r, r⟩
    is the eigenvalue that made it grow.
    """
    residual, image = residual.double(), image.double()
    squared = (residual * residual).sum().item()
    eigenvalue = (residual * image).sum().item() / squared
    if eigenvalue >= 2:
        return (
            f"An eigenvalue of scale·PA is about {eigenvalue:.4g}, and all must be below 2: scale "
            f"must be below {2 * scale / eigenvalue:.4g}, and 1/λ_max = {scale / eigenvalue:.4g} "
            f"is a good one (it is {scale:.4g})"
        )
    if eigenvalue <= 0:
        return (
            f"An eigenvalue of scale·PA is about {eigenvalue:.4g}, and all must be above 0: A is "
            f"not positive definite (PA has an eigenvalue of about {eigenvalue / scale:.4g}), and "
            "no scale helps. Solve with the convexified B̂ = (1−μ)·I + μ·η·A in place of A, where "
            "η = 1/λ_max and μ = λ_max/(|λ_min| + λ_max) from bounds just outside A's eigenvalues"
        )
    factor = _norm(residual - image) / math.sqrt(squared)
    return (
        f"The residual grows by {factor:.4g} a term though its Rayleigh quotient {eigenvalue:.4g} "
        "lies in (0, 2): scale·PA has eigenvalues on both sides of (0, 2) at once, or complex "
        "ones (A not symmetric, or P not symmetric positive definite)"
    )


def _norm(vector: Tensor) -> float:
    # In float64, where the squares of float32 neither overflow nor vanish.
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
    # Gradient mode is left to the operator, which may well differentiate to form its product.
    result = operator(vector).detach()
    if result.shape != vector.shape or result.dtype != vector.dtype:
        raise ValueError(
            f"{name} returned shape {tuple(result.shape)} and {result.dtype} for a vector of shape "
            f"{tuple(vector.shape)} and {vector.dtype}; both must be kept"
        )
    return result


def _check(b: Tensor, scale: float, tolerance: float, max_terms: int, start: Tensor | None) -> None:
    if b.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"b must be float32 or float64, got {b.dtype}")
    if not torch.isfinite(b).all():
        raise ValueError("b must be finite, got NaN or infinity in it")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be finite and above 0, got {scale!r}")
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance must be finite and at least 0, got {tolerance!r}")
    if not isinstance(max_terms, int) or isinstance(max_terms, bool) or max_terms < 1:
        raise ValueError(f"max_terms must be an integer of at least 1, got {max_terms!r}")
    if start is not None:
        if start.shape != b.shape or start.dtype != b.dtype or start.device != b.device:
            raise ValueError(
                f"start must be like b, of shape {tuple(b.shape)}, {b.dtype} on {b.device}, got "
                f"{tuple(start.shape)}, {start.dtype} on {start.device}"
            )
        if not torch.isfinite(start).all():
            raise ValueError("start must be finite, got NaN or infinity in it")
