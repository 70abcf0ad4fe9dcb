"""Lanczos with full reorthogonalization, run until the ends of the spectrum are known.

    βⱼvⱼ₊₁ = Hvⱼ − αⱼvⱼ − βⱼ₋₁vⱼ₋₁        T = tridiag(β, α, β) = QHQᵀ

Each step computes one product and orthogonalizes it against all vectors so far; otherwise T would
repeat eigenvalues ("ghosts"). The eigenvalues of T approach those of H, the outermost first.
`krylov` takes the steps and measures how accurate the products are; `bounds` says what T implies
about H, and with which probability. A tolerance below the noise of the products is never reached.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from neumann.spectrum.algorithms import bounds
from neumann.spectrum.algorithms.krylov import Krylov
from neumann.spectrum.operators.symmetric import About, Operator
from neumann.spectrum.operators.vectors import random_unit, scalar_dtype
from neumann.validation import require, require_integer

Ends = Literal["both", "smallest", "largest"]
Scale = Literal["largest", "itself"]
Observe = Callable[[int, float, float], object]  # step, smallest and largest Ritz value

ERROR_PER_DIFFERENCE = 3.0  # of two products; 2 if the second errs half as much
EXACT = 4.0  # times the least possible noise: products below this are exact up to rounding


@dataclass(frozen=True)
class Extreme:
    """One end of a spectrum, λ_min or λ_max, in the matrix's units."""

    value: float  # the Ritz value at this end; it lies inside the spectrum
    error: float  # |value − λ| is at most this, except with the run's risk
    residual: float  # ‖Hy − value·y‖: some eigenvalue is this close, before rounding
    tolerance: float  # the error that was asked for; 0 if none was
    converged: bool  # error ≤ tolerance; or the whole space was searched, with exact products


@dataclass(frozen=True)
class Lanczos:
    """A Lanczos run of k steps. Tensors are float64 on the CPU, except the vectors."""

    values: Tensor  # (k,) Ritz values, ascending, in the matrix's units
    residuals: Tensor  # (k,) some eigenvalue is this close to each, before rounding
    converged: Tensor  # (k,) bool: residual plus noise is within the tolerance
    weights: Tensor  # (k,) squared components of the start, sum 1: weights of a quadrature
    smallest: Extreme
    largest: Extreme
    vectors: Tensor | None  # (2m or fewer, n) Ritz vectors as rows, on the operator's device
    vector_values: Tensor  # (2m or fewer,) their Ritz values, ascending
    diagonal: Tensor  # (k,) α of T
    off_diagonal: Tensor  # (k,) β of T; the last one is left over
    steps: int  # k
    products: int  # with the operator; more than k after a breakdown
    restarts: int  # new random directions, one per breakdown
    noise: float  # estimated ‖error of T‖ from products and rounding; part of every error
    risk: float  # probability, for each end, that its error is larger than stated
    about: About


@dataclass(frozen=True)
class Extremes:
    """λ_min and λ_max, and what they cost."""

    smallest: Extreme
    largest: Extreme
    steps: int  # of Lanczos
    products: int  # with the operator
    noise: float  # part of both errors that more steps cannot remove, in the matrix's units
    risk: float  # probability, for each end, that its error is larger than stated
    about: About
    ends: Ends = "both"  # the ends that had to converge

    @property
    def converged(self) -> bool:
        """Whether the requested ends converged."""
        smallest = self.smallest.converged or self.ends == "largest"
        largest = self.largest.converged or self.ends == "smallest"
        return smallest and largest

    @property
    def outside(self) -> tuple[float, float]:
        """Bounds that enclose all eigenvalues, except with twice the risk."""
        low, high = self.smallest, self.largest
        return low.value - low.error, high.value + high.error

    def as_dict(self) -> dict[str, Any]:
        """Convert to numbers, strings, lists and dicts that JSON can hold."""
        plain = asdict(self)
        plain["about"].update(
            dtype=str(self.about.dtype), device=str(self.about.device), names=list(self.about.names)
        )
        return plain


def lanczos(
    operator: Operator,
    *,
    tolerance: float = 1e-3,
    relative_to: Scale = "largest",
    ends: Ends = "both",
    max_products: int = 400,
    seed: int = 0,
    start: Tensor | None = None,
    risk: float = 1e-3,
    restart: bool = True,
    vectors: int = 0,
    host: bool = False,
    observe: Observe | None = None,
) -> Lanczos:
    """Compute Ritz values of the operator, and the ends of its spectrum with error bounds.

    Args:
        operator: the symmetric matrix, such as a `Hessian` or a `MatrixOperator`.
        tolerance: stop when the errors of the ends are within this fraction of the scale; 0 uses
            the whole budget.
        relative_to: the scale: the "largest" |λ|, or "itself" for each end's own |λ|. An end at 0
            never converges relative to itself.
        ends: which ends must converge.
        max_products: the budget; n products are always enough.
        seed: of the random start.
        start: your own start vector; the stated risk then does not apply.
        risk: the probability, for each end, of an error larger than stated.
        restart: whether to continue in a new direction after a breakdown while the ends are not
            known.
        vectors: how many Ritz vectors of each end to return.
        host: keep the Lanczos vectors in host memory.
        observe: a function that is called from time to time with the step and the outermost Ritz
            values.

    Raises:
        NonFiniteProduct: a product contained NaN or infinity.
    """
    good = math.isfinite(tolerance) and tolerance >= 0
    require(good, "tolerance", tolerance, "finite and at least 0")
    for name, choice, allowed in (("relative_to", relative_to, Scale), ("ends", ends, Ends)):
        require(choice in get_args(allowed), name, choice, f"one of {get_args(allowed)}")
    require(0 < risk < 1, "risk", risk, "between 0 and 1")
    require_integer("max_products", max_products, least=1)
    require_integer("vectors", vectors, least=0)
    run = Krylov(operator, _first_vector(operator, seed, start), seed, host)
    required = {"both": (0, 1), "smallest": (0,), "largest": (1,)}[ends]
    with operator.session():
        product_error = operator.product_error()
        while True:
            # Reading T waits for the device, and its eigenvalues cost more the larger it gets.
            run.advance(min(1 + run.steps // 32, max_products - run.products))
            run.fetch()
            values, eigenvectors = bounds.ritz_values(run.diagonal, run.off_diagonal)
            noise, few_steps = _measure_noise(run, values, product_error, risk)
            if observe is not None:
                observe(run.steps, float(values[0]), float(values[-1]))
            done = run.steps == operator.size or run.products >= max_products
            if tolerance > 0 and not done:
                errors = _end_errors(run, values, eigenvectors, risk / 2 if few_steps else risk)
                limits = _allowed_errors(values, tolerance, relative_to)[[0, -1]].tolist()
                # What the noise leaves of the tolerance. If it leaves nothing, more steps do not
                # help, and an eighth of the tolerance ends the run. They do help after few steps.
                least = 0.0 if few_steps else 1 / 8
                room = [max(error - noise, error * least) for error in limits]
                done = all(errors[end] <= room[end] for end in required)
            if run.broken and not done:
                done = not (restart and run.restart())
            if done:
                break
        return _summarize(run, product_error, tolerance, relative_to, risk, vectors)


def extremes(operator: Operator, *, ends: Ends = "both", **options: Any) -> Extremes:
    """Compute λ_min and λ_max, each with an error bound.

    With the defaults both are within 1e-3·max|λ| for any spectrum, except with probability `risk`
    for each. An end that does not converge within the budget says so; its error bound still holds.

    Args:
        ends: which ends must converge: "both", "smallest" or "largest".
        options: tolerance, relative_to, max_products, seed, start, risk, host and observe, as for
            :func:`lanczos`.
    """
    run = lanczos(operator, ends=ends, **options)
    return Extremes(
        run.smallest, run.largest, run.steps, run.products, run.noise, run.risk, run.about, ends
    )


def _measure_noise(
    run: Krylov, values: Tensor, product_error: float, risk: float
) -> tuple[float, bool]:
    """Return the noise, and whether it takes half of the risk because few steps show little."""
    plain = run.noise(float(values.abs().max()))
    few_steps = run.few_steps_noise(risk / 2)
    return max(plain, few_steps) + product_error, few_steps > plain


def _check_ends(run: Krylov, values: Tensor, eigenvectors: Tensor) -> float:
    """Return how far the ends are from Rayleigh quotients of new products.

    The products with the Lanczos vectors may have errors that are as symmetric as the matrix, such
    as those of kinks. For a Ritz vector y, yᵀHy lies in the spectrum, and differs from θ by at most
    what a new product shows and the error of that.
    """
    operator, wide = run.operator, scalar_dtype(run.operator.device)
    if not operator.has_second_product:
        return 0.0
    run.basis.truncate(run.steps)
    found = []
    for end in (0, -1):
        unit = run.basis.combine(eigenvectors[:, end][None])[0]
        near, other = operator.product(unit), operator.second_product(unit)
        quotient = float((unit * near).sum(dtype=wide))
        error = ERROR_PER_DIFFERENCE * abs(float((unit * (near - other)).sum(dtype=wide)))
        found.append(abs(quotient - float(values[end])) + error)
    agreed: float = operator.agree(torch.tensor(max(found), dtype=torch.float64)).item()
    return agreed


def _end_errors(
    run: Krylov, values: Tensor, eigenvectors: Tensor, risk: float
) -> tuple[float, float]:
    """Return the errors of the smallest and the largest Ritz value, before noise.

    The outer bound is too small if the start was less likely than the risk. The residual, normally
    far smaller, is then still large because the Ritz value is moving.
    """
    if run.steps == run.operator.size:
        return 0.0, 0.0
    segments = run.segments()
    size, segment_risk = run.operator.size, bounds.share_of_risk(risk, len(segments))
    limit_together = bounds.plausible_limit(size, segment_risk, len(segments))
    limit_alone = bounds.plausible_limit(size, segment_risk)
    hidden = run.hidden(float(values.abs().max()))

    def error(end: int, sign: float) -> float:
        residual = run.off_diagonal[-1] * abs(float(eigenvectors[-1, end]))
        top = sign * float(values[end])

        def bound(segment: tuple[list[float], list[float]], limit: float) -> float:
            diagonal = [sign * alpha for alpha in segment[0]]
            return bounds.outer_bound(diagonal, segment[1], top, limit, hidden)

        beyond = bound(segments[-1], limit_alone)
        if len(segments) > 1:
            beyond = min(beyond, max(bound(segment, limit_together) for segment in segments))
        return max(residual, beyond)

    return error(0, -1.0), error(-1, 1.0)


def _allowed_errors(values: Tensor, tolerance: float, relative_to: Scale) -> Tensor:
    sizes = values.abs()
    return tolerance * (sizes if relative_to == "itself" else sizes.max().expand_as(sizes))


def _summarize(
    run: Krylov,
    product_error: float,
    tolerance: float,
    relative_to: Scale,
    risk: float,
    vectors: int,
) -> Lanczos:
    values, eigenvectors = bounds.ritz_values(run.diagonal, run.off_diagonal)
    noise, few_steps = _measure_noise(run, values, product_error, risk)
    residuals = run.off_diagonal[-1] * eigenvectors[-1].abs()
    allowed = _allowed_errors(values, tolerance, relative_to)
    noise = max(noise, _check_ends(run, values, eigenvectors))
    errors = _end_errors(run, values, eigenvectors, risk / 2 if few_steps else risk)
    # Once the whole space is searched there is nothing left to find, if the products are exact.
    scale = float(values.abs().max())
    exact = run.noise(scale) + product_error <= EXACT * run.rounding(scale)
    complete = run.steps == run.operator.size and exact

    def extreme(end: int) -> Extreme:
        error, room = errors[end] + noise, float(allowed[-end])
        reached = complete or (tolerance > 0 and error <= room)
        return Extreme(float(values[-end]), error, float(residuals[-end]), room, reached)

    chosen = torch.arange(len(values))
    if 2 * vectors < len(values):
        chosen = torch.cat([chosen[:vectors], chosen[len(values) - vectors :]])
    run.basis.truncate(run.steps)
    return Lanczos(
        values=values,
        residuals=residuals,
        converged=residuals + noise <= allowed,
        weights=eigenvectors[0].square(),
        smallest=extreme(0),
        largest=extreme(1),
        vectors=run.basis.combine(eigenvectors[:, chosen].T) if vectors else None,
        vector_values=values[chosen] if vectors else values[:0],
        diagonal=torch.tensor(run.diagonal, dtype=torch.float64),
        off_diagonal=torch.tensor(run.off_diagonal, dtype=torch.float64),
        steps=run.steps,
        products=run.products,
        restarts=len(run.starts) - 1,
        noise=noise,
        risk=risk,
        about=run.operator.about,
    )


def _first_vector(operator: Operator, seed: int, start: Tensor | None) -> Tensor:
    if start is None:
        return random_unit(operator.size, seed, operator.dtype, operator.device)
    operator.check_vector(start)
    length = torch.linalg.vector_norm(start, dtype=scalar_dtype(start.device))
    if not (torch.isfinite(length) and length > 0):
        raise ValueError(f"start must be finite and not 0, got a vector of norm {float(length)}")
    unit: Tensor = start / length.to(start.dtype)
    return unit
