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

**Breakdowns.** βₖ is computed with rounding. Below some units of it βₖ is not told from 0, and a
part of the start along u that is tiny itself hides there: with u·v₁ = 1e-5, an eigenvalue 1 % off
the others leaves 1e-7 in the first step, the rounding of float32. βₖ then counts as the largest
that can hide, and S seldom reaches the limit at once. The run goes on from a new random vector
orthogonal to all so far, and each of m such starts has its own S. That all of them have a part
below t has a probability of at most (t·√(2n/π))ᵐ, so that λ is ruled out where S of every start
reaches 2n/(π·r²) with rᵐ = risk: what one misses by chance, the others do not. It is ruled out as
well where S of the newest alone reaches the number for a single start. As a run may stop at any m
and in either way, a hundredth of the risk is kept for m > 1 and shared among them.

The bound is sharp: on spectra with single eigenvalues at the ends it fails about as often as
stated. Where it fails, the Ritz value is mostly on its way, with a large residual; the errors that
`lanczos` states are the larger of the two, and were exceeded in 1 % of such runs at a risk of 10 %.

How it fails: a start that is not random carries no such promise.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

KEPT = 0.01  # of the risk, for runs with several starts


def ritz(diagonal: Sequence[float], beside: Sequence[float]) -> tuple[Tensor, Tensor]:
    """The eigenvalues of T (k,), ascending, and its eigenvectors (k, k) as columns."""
    values, vectors = torch.linalg.eigh(_dense(diagonal, beside))
    return values, vectors


def most_plausible(size: int, risk: float, starts: int = 1) -> float:
    """The S(λ) that an eigenvalue does not exceed for all of the starts, except with the risk."""
    each: float = risk ** (1 / starts)
    return 2 * size / (math.pi * each**2)


def share(risk: float, starts: int) -> float:
    """Of the risk, for each way to stop with so many starts; over all of them they add up to it."""
    return risk * (KEPT / (2 * starts * (starts - 1)) if starts > 1 else 1 - KEPT)


def outer_bound(
    diagonal: Sequence[float],
    beside: Sequence[float],
    largest: float,
    limit: float,
    hidden: float = 0.0,
) -> float:
    """How far above `largest`, the largest Ritz value, S reaches the limit; may be infinite.

    `beside` has βₖ as its last number; a β below `hidden` counts as that. For the other end of the
    spectrum pass −T.
    """
    scale = max(abs(x) for x in (largest, *diagonal, *beside))
    if scale == 0:
        return 0.0
    numbers = torch.finfo(torch.float64)
    smallest = max(numbers.eps * scale, numbers.tiny)
    beside = [max(b, hidden) for b in beside]
    if _exceeds(diagonal, beside, largest + smallest, limit):
        return smallest
    near, far = smallest, scale
    while not _exceeds(diagonal, beside, largest + far, limit):
        near, far = far, 4 * far
        if far > 1e12 * scale:
            return math.inf
    while far > 1.01 * near:
        middle = near * math.sqrt(far / near)  # √(near·far), which may be too small a product
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
        if b <= 0:  # exactly: all that the start has a part in lies inside
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
