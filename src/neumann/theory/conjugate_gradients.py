"""Conjugate gradients, the Krylov method with which the paper compares its series (appendix A).

Solves (A + λI)·x = b using only products with A, for symmetric A. After k products x minimizes
½xᵀ(A + λI)x − bᵀx over the span of b, Ab, …, A^{k−1}b; the series only picks a point of it. So no
polynomial of the same degree comes closer, but each product depends on the last one's outcome.

How it fails: x is only defined if A + λI is positive definite. At the first direction of negative
curvature the solve ends, as in the line-search Newton–CG method (Nocedal and Wright, Numerical
Optimization, Algorithm 7.1): with x as it is, or with b if it was the first direction.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from neumann.validation import is_number, require, require_integer

__all__ = ["KrylovSolution", "solve"]


@dataclass(frozen=True)
class KrylovSolution:
    """The solution, and how it was reached."""

    solution: Tensor  # shape, dtype and device of b
    residual: float  # ‖b − (A + λI)·x‖ / ‖b‖, updated and not measured
    products: int  # with A
    end: Literal["converged", "negative curvature", "max_products"]


@torch.no_grad()
def solve(
    matvec: Callable[[Tensor], Tensor],
    b: Tensor,
    *,
    damping: float = 0.0,
    tolerance: float = 1e-5,
    max_products: int = 1000,
) -> KrylovSolution:
    """Solve (A + λI)·x = b until ‖residual‖ ≤ ``tolerance``·‖b‖, or for ``max_products`` products.

    Args:
        matvec: A, a symmetric linear map between tensors shaped like b.
        b: of any shape; inner products run over all its elements.
        damping: λ, at least 0.
        tolerance: the relative residual at which the solve ends.
        max_products: the most products with A.
    """
    for name, value in (("damping", damping), ("tolerance", tolerance)):
        require(is_number(value) and value >= 0, name, value, "finite and at least 0")
    require_integer("max_products", max_products, least=1)
    solution, residual, direction = torch.zeros_like(b), b.clone(), b.clone()
    start = squared = _dot(b, b)
    if start == 0:
        return KrylovSolution(solution, 0.0, 0, "converged")
    for products in range(1, max_products + 1):
        image = matvec(direction).add(direction, alpha=damping)
        curvature = _dot(direction, image)
        if curvature <= 0:
            if products == 1:  # x = b, and the image is (A + λI)·b
                solution, residual = b.clone(), b - image
                squared = _dot(residual, residual)
            return KrylovSolution(
                solution, (squared / start) ** 0.5, products, "negative curvature"
            )
        length = squared / curvature
        solution.add_(direction, alpha=length)
        residual.sub_(image, alpha=length)
        before, squared = squared, _dot(residual, residual)
        if squared <= tolerance**2 * start:
            return KrylovSolution(solution, (squared / start) ** 0.5, products, "converged")
        direction.mul_(squared / before).add_(residual)
    return KrylovSolution(solution, (squared / start) ** 0.5, max_products, "max_products")


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.reshape(-1), b.reshape(-1)))
