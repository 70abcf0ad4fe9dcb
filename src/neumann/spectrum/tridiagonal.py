"""What the tridiagonal matrix T of a Lanczos run says about the eigenvalues of H.

After k steps from v₁, T has the numbers α₁…αₖ on its diagonal and β₁…βₖ₋₁ beside it, and βₖ is left
over. Its eigenvalues θ are the Ritz values, with two kinds of bounds.

**Residual.** For a Ritz value θ with eigenvector s of T, some eigenvalue of H lies within βₖ·|s_k|
of θ. Which one, this bound does not say: at the end of the spectrum θ often stays a while at the
second eigenvalue before the first shows.

**Outer bound.** An end of the spectrum is bounded by how unlikely a random start is to miss it. Let
λ be an eigenvalue with unit eigenvector u. The vectors of the run are vⱼ = πⱼ(H)v₁ with polynomials

    π₁ = 1,   βⱼπⱼ₊₁(λ) = (λ − αⱼ)πⱼ(λ) − βⱼ₋₁πⱼ₋₁(λ),

so u·vⱼ = (u·v₁)πⱼ(λ), and since the vⱼ are orthonormal

    (u·v₁)²·S(λ) ≤ 1        S(λ) = Σⱼ πⱼ(λ)²,  j = 1 … k+1.

All zeros of the πⱼ lie among the Ritz values, so S grows with every step outside of them. A start
that is uniform on the sphere has |u·v₁| < t with a probability of at most t·√(2n/π). Except with
probability `risk`, therefore, S(λ) ≤ 2n/(π·risk²), and λ_max lies between the largest θ and the
point above it where S reaches that number (van Dorsselaer, Hochstenbach and van der Vorst, 2000).
The exception is one of the start, so the bound holds at whatever step one stops, for any spectrum.

The bound is sharp: on spectra with single eigenvalues at the ends it fails about as often as
stated. Where it fails, the Ritz value is mostly on its way, with a large residual; the errors that
`lanczos` states are the larger of the two, and were exceeded in 1 % of such runs at a risk of 10 %.

How it fails: a start that is not random carries no such promise.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def ritz(diagonal: Sequence[float], beside: Sequence[float]) -> tuple[Tensor, Tensor]:
    """The eigenvalues of T (k,), ascending, and its eigenvectors (k, k) as columns."""
    values, vectors = torch.linalg.eigh(_dense(diagonal, beside))
    return values, vectors


def most_plausible(size: int, risk: float) -> float:
    """The largest S(λ) of an eigenvalue, except with probability `risk`: 2n/(π·risk²)."""
    return 2 * size / (math.pi * risk**2)


def outer_bound(
    diagonal: Sequence[float], beside: Sequence[float], largest: float, limit: float
) -> float:
    """How far above `largest`, the largest Ritz value, S reaches the limit; may be infinite.

    `beside` has βₖ as its last number. For the other end of the spectrum pass −T.
    """
    scale = max(abs(x) for x in (*diagonal, *beside))
    smallest = torch.finfo(torch.float64).eps * scale
    if scale == 0 or _exceeds(diagonal, beside, largest + smallest, limit):
        return smallest
    near, far = smallest, scale
    while not _exceeds(diagonal, beside, largest + far, limit):
        near, far = far, 4 * far
        if far > 1e12 * scale:
            return math.inf
    while far > 1.01 * near:
        middle = math.sqrt(near * far)
        if _exceeds(diagonal, beside, largest + middle, limit):
            far = middle
        else:
            near = middle
    return far


def _exceeds(
    diagonal: Sequence[float], beside: Sequence[float], point: float, limit: float
) -> bool:
    """Whether S(point) is above the limit, for a point above all Ritz values."""
    before, now, total, last = 0.0, 1.0, 1.0, 0.0
    for a, b in zip(diagonal, beside, strict=True):
        following = (point - a) * now - last * before
        if b <= 0:  # an invariant subspace: all that the start has a part in lies inside
            return True
        before, now, last = now, following / b, b
        total += now * now
        if total > limit:
            return True
    return False


def _dense(diagonal: Sequence[float], beside: Sequence[float]) -> Tensor:
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if len(diagonal) > 1:
        off = torch.tensor(beside[: len(diagonal) - 1], dtype=torch.float64)
        matrix += torch.diag(off, 1) + torch.diag(off, -1)
    return matrix
