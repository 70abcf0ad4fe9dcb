"""The density of eigenvalues, by stochastic Lanczos quadrature.

k Lanczos steps from a unit vector v give a Gauss quadrature of the distribution Σ (u·v)²·δ(t − λ)
over all eigenpairs: the nodes are the Ritz values θ, the weights s₁² the squared first components
of T's eigenvectors. Its average over random v is the density of eigenvalues, (1/n)·Σ δ(t − λ). Each
node is widened to a normal curve of standard deviation `width`:

    density(t) = mean over v of  Σ s₁²·N(t; θ, width²)        its integral is 1

The first step of each run also estimates trace H = n·E[vᵀHv] and ‖H‖²_F = n·E[‖Hv‖²], because
vᵀHv = α₁ and ‖Hv‖² = α₁² + β₁². The variance over random directions v is known:

    Var(n·vᵀAv) = 2n/(n + 2)·(‖A‖²_F − (trace A)²/n)        A = H for the trace, A = H² for the norm

The confidence intervals use it where it exceeds the spread of the probes: based on the spread
alone, 95 % intervals held in only 82 to 92 % of trials, because a few outliers make vᵀHv skewed.
The band covers the mean over probes, neither the error of the quadrature nor what `width` smooths
away. For single eigenvalues use `extremes` or `lanczos`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from neumann.spectrum.algorithms.lanczos import Lanczos, Observe, lanczos
from neumann.spectrum.operators.symmetric import About, Operator
from neumann.validation import require, require_integer


@dataclass(frozen=True)
class Estimate:
    """A mean over probes."""

    value: float
    standard_error: float
    lower: float  # of the confidence interval, by Student's t
    upper: float


@dataclass(frozen=True)
class Density:
    """The density of eigenvalues. Tensors are float64 on the CPU; m points, p probes, k steps."""

    points: Tensor  # (m,) eigenvalues t, evenly spaced, in the matrix's units
    density: Tensor  # (m,) share of eigenvalues per unit of t; integrates to 1
    lower: Tensor  # (m,) lower edge of the confidence band at each point; at least 0
    upper: Tensor  # (m,) upper edge
    width: float  # standard deviation of the normal curve around each node
    nodes: tuple[Tensor, ...]  # for each probe, up to k Ritz values
    weights: tuple[Tensor, ...]  # for each probe, the weights of its nodes, sum 1
    trace: Estimate  # Σλ
    frobenius: Estimate  # √Σλ²
    confidence: float  # of the intervals, and of the band at each single point
    probes: int
    products: int
    about: About


def density(
    operator: Operator,
    *,
    probes: int = 8,
    steps: int = 80,
    seed: int = 0,
    points: int = 512,
    width: float | None = None,
    confidence: float = 0.95,
    host: bool = False,
    observe: Observe | None = None,
) -> Density:
    """Estimate the density of the operator's eigenvalues, its trace and its Frobenius norm.

    Args:
        operator: the symmetric matrix, such as a `Hessian` or a `MatrixOperator`.
        probes: random starts, at least 2; the spread between them gives the band.
        steps: Lanczos steps per probe, one product each.
        seed: of the first start; the others count up from it.
        points: where the density is evaluated, evenly spaced across all Ritz values.
        width: of the normal curves; by default a hundredth of the spectrum's width.
        confidence: of the band and the intervals.
        host: keep the Lanczos vectors in host memory.
        observe: a function that is called from time to time with the number of products so far and
            a run's outermost Ritz values.
    """
    require_integer("probes", probes, least=2)
    require_integer("steps", steps, least=1)
    require_integer("points", points, least=2)
    require(0 < confidence < 1, "confidence", confidence, "between 0 and 1")
    require(width is None or 0 < width < math.inf, "width", width, "finite and above 0")
    runs: list[Lanczos] = []

    def observe_all(step: int, low: float, high: float) -> None:
        if observe is not None:
            observe(sum(r.products for r in runs) + step, low, high)

    with operator.session():
        for probe in range(probes):
            run = lanczos(
                operator,
                tolerance=0.0,
                max_products=steps,
                seed=seed + probe,
                restart=False,  # at a breakdown the quadrature is exact
                host=host,
                observe=observe_all,
            )
            runs.append(run)
    nodes, weights = tuple(r.values for r in runs), tuple(r.weights for r in runs)
    low, high = min(float(n[0]) for n in nodes), max(float(n[-1]) for n in nodes)
    if width is None:
        width = (high - low) / 100 or 1e-3 * max(abs(high), 1.0)
    grid = torch.linspace(low - 5 * width, high + 5 * width, points, dtype=torch.float64)
    curves = torch.stack([_curve(grid, n, w, width) for n, w in zip(nodes, weights, strict=True)])
    factor = student_t_quantile(0.5 + confidence / 2, probes - 1)
    half_band = factor * curves.std(0) / math.sqrt(probes)
    mean = curves.mean(0)
    trace, frobenius = _estimate_sums(runs, operator.size, factor)
    return Density(
        points=grid,
        density=mean,
        lower=(mean - half_band).clamp(min=0),
        upper=mean + half_band,
        width=width,
        nodes=nodes,
        weights=weights,
        trace=trace,
        frobenius=frobenius,
        confidence=confidence,
        probes=probes,
        products=sum(r.products for r in runs),
        about=operator.about,
    )


def _curve(grid: Tensor, nodes: Tensor, weights: Tensor, width: float) -> Tensor:
    distance = (grid[:, None] - nodes) / width
    peaks = torch.exp(-distance.square() / 2) / (width * math.sqrt(2 * math.pi))
    return peaks @ weights


def _estimate_sums(runs: list[Lanczos], size: int, factor: float) -> tuple[Estimate, Estimate]:
    """Return trace and Frobenius norm, from each run's estimates of Σλ, Σλ² and Σλ⁴."""
    first = size * torch.stack([r.diagonal[0] for r in runs])
    second = size * torch.stack([r.diagonal[0].square() + r.off_diagonal[0].square() for r in runs])
    fourth = size * torch.stack([(r.weights * r.values**4).sum() for r in runs])
    trace = _estimate_trace(first, second.mean(), size, factor)
    squared = _estimate_trace(second, fourth.mean(), size, factor)
    root = math.sqrt(squared.value)
    error = squared.standard_error / (2 * root) if root > 0 else 0.0
    lower, upper = (math.sqrt(max(x, 0.0)) for x in (squared.lower, squared.upper))
    return trace, Estimate(root, error, lower, upper)


def _estimate_trace(samples: Tensor, squares: Tensor, size: int, factor: float) -> Estimate:
    """Average the samples of a trace; `squares` is the sum of the squared eigenvalues."""
    known = 2 * size / (size + 2) * (squares - samples.mean().square() / size)
    spread = math.sqrt(max(float(samples.var()), float(known)))
    mean, error = float(samples.mean()), spread / math.sqrt(len(samples))
    return Estimate(mean, error, mean - factor * error, mean + factor * error)


def student_t_probability(t: float, freedom: int) -> float:
    """Return the probability of |T| ≤ t for Student's t with ν degrees of freedom.

    With θ = atan(t/√ν) it is a finite sum:

        ν odd:   (2/π)·(θ + sin θ·(cos θ + ⅔cos³θ + (2·4)/(3·5)·cos⁵θ + … up to cos^{ν−2}θ))
        ν even:  sin θ·(1 + ½cos²θ + (1·3)/(2·4)·cos⁴θ + … up to cos^{ν−2}θ)
    """
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * cosine**2
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def student_t_quantile(probability: float, freedom: int) -> float:
    """Return the t with P(T ≤ t) = probability, by bisection; for a probability in [0.5, 1)."""
    require(0.5 <= probability < 1, "probability", probability, "in [0.5, 1)")
    require_integer("freedom", freedom, least=1)
    low, high = 0.0, 1.0
    while student_t_probability(high, freedom) < 2 * probability - 1:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if student_t_probability(middle, freedom) < 2 * probability - 1:
            low = middle
        else:
            high = middle
    return high
