"""What the tridiagonal matrix T of a Lanczos run says about the eigenvalues of H.

After k steps from v₁, T has α₁…αₖ on its diagonal and β₁…βₖ₋₁ next to it; βₖ is left over.

**Residual.** Let s be the eigenvector of T for the Ritz value θ. Some eigenvalue of H lies within
βₖ·|sₖ| of θ. At the end of a spectrum that may be the second one, before the first shows up.

**Outer bound.** Let λ be an eigenvalue with unit eigenvector u. The vectors of the run are
vⱼ = πⱼ(H)v₁, so u·vⱼ = (u·v₁)πⱼ(λ), and since they are orthonormal

    (u·v₁)²·S(λ) ≤ 1        S(λ) = Σⱼ πⱼ(λ)²,  j = 1 … k+1
    π₁ = 1,   βⱼπⱼ₊₁(λ) = (λ − αⱼ)πⱼ(λ) − βⱼ₋₁πⱼ₋₁(λ)

Outside the Ritz values S grows with every step. A start that is uniform on the sphere has
|u·v₁| < t with probability at most t·√(2n/π). So, except with probability `risk`, λ_max lies
between the largest θ and the point where S reaches 2n/(π·risk²), for any spectrum and at any step
(van Dorsselaer, Hochstenbach and van der Vorst, 2000). It says nothing about a start you choose.

**Breakdowns.** A small component of the start can hide in a βₖ below rounding, so such a βₖ counts
as the largest value that can hide, and the run continues from a new random vector. All m starts
have a component below t with probability at most (t·√(2n/π))ᵐ. So λ is ruled out where the S of
every start reaches 2n/(π·r²) with rᵐ = risk, or where the S of the newest one reaches the limit for
a single start. Since a run may stop at any m and in either way, 1 % of the risk is reserved for
m > 1 and split among these cases.

The bound is sharp. When it fails, the Ritz value is usually still moving and has a large residual.
`lanczos` states the larger of the two: at a risk of 10 % its errors were too small in 1 % of runs.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Floats = Sequence[float]
RESERVED = 0.01  # share of the risk for runs with several starts


def ritz_values(diagonal: Floats, off_diagonal: Floats) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of T (k,), ascending, and its eigenvectors (k, k) as columns."""
    beta = torch.tensor(off_diagonal[: len(diagonal) - 1], dtype=torch.float64)
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    values, vectors = torch.linalg.eigh(matrix + torch.diag(beta, 1) + torch.diag(beta, -1))
    return values, vectors


def plausible_limit(size: int, risk: float, starts: int = 1) -> float:
    """Return the S(λ) that no eigenvalue exceeds for all starts at once, except with the risk."""
    each: float = risk ** (1 / starts)
    return 2 * size / (math.pi * each**2)


def share_of_risk(risk: float, starts: int) -> float:
    """Return the risk for each way to stop with this many starts; all of them sum to `risk`."""
    return risk * (RESERVED / (2 * starts * (starts - 1)) if starts > 1 else 1 - RESERVED)


def outer_bound(
    diagonal: Floats, off_diagonal: Floats, largest: float, limit: float, hidden: float = 0.0
) -> float:
    """Return how far above `largest`, the largest Ritz value, S reaches the limit.

    For the lower end of the spectrum pass −T. `off_diagonal` is β₁…βₖ; one below `hidden` counts as
    that. The distance is accurate to 1 %, and infinite if S reaches the limit nowhere.
    """
    scale = max(abs(x) for x in (largest, *diagonal, *off_diagonal))
    if scale == 0:
        return 0.0
    float64 = torch.finfo(torch.float64)
    smallest = max(float64.eps * scale, float64.tiny)
    betas = [max(beta, hidden) for beta in off_diagonal]
    if _exceeds(diagonal, betas, largest + smallest, limit):
        return smallest
    near, far = smallest, scale
    while not _exceeds(diagonal, betas, largest + far, limit):
        near, far = far, 4 * far
        if far > 1e12 * scale:
            return math.inf
    while far > 1.01 * near:
        middle = near * math.sqrt(far / near)  # √(near·far), whose product might underflow
        if _exceeds(diagonal, betas, largest + middle, limit):
            far = middle
        else:
            near = middle
    return far


def _exceeds(diagonal: Floats, off_diagonal: Floats, point: float, limit: float) -> bool:
    """Whether S(point) exceeds the limit, for a point above all Ritz values."""
    before, now, total, last = 0.0, 1.0, 1.0, 0.0
    for alpha, beta in zip(diagonal, off_diagonal, strict=True):
        following = (point - alpha) * now - last * before
        if beta <= 0:  # exactly invariant: the start has no component outside
            return True
        before, now, last = now, following / beta, beta
        total += now * now
        if total > limit:
            return True
    return False
