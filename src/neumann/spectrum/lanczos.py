"""Lanczos with full reorthogonalisation, until the ends of the spectrum are known.

From a random unit vector v₁, each step takes one product and orthogonalises it against all vectors
so far,

    βⱼvⱼ₊₁ = Hvⱼ − αⱼvⱼ − βⱼ₋₁vⱼ₋₁        T = tridiag(β, α, β) = QHQᵀ

and T's eigenvalues approach those of H, the outermost first. Without reorthogonalisation rounding
makes the vectors dependent and T repeats eigenvalues ("ghosts"); here the vectors stay orthogonal
to rounding, see `basis`. What T says about H, and with which probability, see `tridiagonal`. A
shift of H changes nothing, since the space is the same: λ_min takes more steps than λ_max where the
negative eigenvalues lie close to the bulk, and ten steps are not enough there.

Products are not exact, so T is that of a matrix near H; how near is measured, see `krylov`, and
part of every error. A tolerance below this noise is never reached.

How it fails: an operator that is not symmetric in substance shows as a large noise. A start given
by the caller is not random, and the errors of the ends are then no more than plausible. At a
breakdown, β = 0 to rounding, the space so far is invariant as far as can be seen. Unless the ends
are known by then the run goes on in a new random direction orthogonal to it, which finds what hid
below rounding and the copies of multiple eigenvalues.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from neumann.spectrum.basis import scalar_dtype
from neumann.spectrum.krylov import Krylov
from neumann.spectrum.operators import Operator
from neumann.spectrum.results import Ends, Extreme, Lanczos
from neumann.spectrum.start import random_unit
from neumann.spectrum.tridiagonal import most_plausible, outer_bound, ritz, share

Scale = Literal["largest", "itself"]
Observe = Callable[[int, float, float], object]  # step, smallest and largest Ritz value

EXACT = 4.0  # times the least noise there is: products with no more are exact to rounding


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
    """Ritz values of the operator, and the ends of its spectrum with error bounds.

    Args:
        tolerance: stop when the errors of the ends are within this share of the scale; 0 spends
            the whole budget.
        relative_to: the scale: the "largest" |λ|, or for each end the end "itself", to which an
            end at 0 never comes near enough.
        ends: which of them must converge.
        max_products: the budget; n products are always enough.
        seed: of the random start.
        start: a start of one's own, which leaves the errors without their probability.
        risk: the probability, for each end, of an error larger than stated.
        restart: go on in a new direction after a breakdown, as long as the ends are not known; if
            False, stop there.
        vectors: how many Ritz vectors of each end to return.
        host: keep the vectors in the host's memory.
        observe: called now and then with the step and the outermost Ritz values.
    """
    _check(tolerance, relative_to, ends, max_products, risk, vectors)
    first = _start(operator, seed, start)
    run = Krylov(operator, first, seed, host)
    budget = max_products
    with operator.session():
        error = operator.product_error()
        while True:
            # Looking at T waits for the device, and costs more the larger it is.
            run.advance(min(1 + run.steps // 32, budget - run.products))
            run.look()
            values, small = ritz(run.diagonal, run.beside)
            noise = run.noise(float(values.abs().max())) + error
            if observe is not None:
                observe(run.steps, float(values[0]), float(values[-1]))
            done = run.steps == operator.size or run.products >= budget
            if tolerance > 0 and not done:
                errors = _errors(run, values, small, risk)
                allowed = _allowed(values, tolerance, relative_to)[[0, -1]].tolist()
                # What the noise leaves of the tolerance; nothing, and more steps will not help.
                room = [max(a - noise, a / 8) for a in allowed]
                wanted = {"both": (0, 1), "smallest": (0,), "largest": (1,)}[ends]
                done = all(errors[i] <= room[i] for i in wanted)
            if run.broken and not done:
                done = not (restart and run.restart())
            if done:
                break
        return _result(run, noise, tolerance, relative_to, risk, vectors)


def _errors(run: Krylov, values: Tensor, small: Tensor, risk: float) -> tuple[float, float]:
    """Of the smallest and the largest Ritz value, before noise.

    The outer bound says how far the spectrum may reach beyond them. A start that is less likely
    than the risk makes it too small; the residual, which is far below it otherwise, is still large
    then while the Ritz value moves.
    """
    if run.steps == run.operator.size:
        return 0.0, 0.0
    parts = run.parts()
    size, part_risk = run.operator.size, share(risk, len(parts))
    together = most_plausible(size, part_risk, len(parts))
    alone = most_plausible(size, part_risk)
    hidden = run.hidden(float(values.abs().max()))

    def error(end: int, sign: float) -> float:
        residual = run.beside[-1] * abs(float(small[-1, end]))
        top = sign * float(values[end])

        def bound(part: tuple[list[float], list[float]], limit: float) -> float:
            return outer_bound([sign * a for a in part[0]], part[1], top, limit, hidden)

        beyond = bound(parts[-1], alone)
        if len(parts) > 1:
            beyond = min(beyond, max(bound(part, together) for part in parts))
        return max(residual, beyond)

    return error(0, -1.0), error(-1, 1.0)


def _allowed(values: Tensor, tolerance: float, relative_to: Scale) -> Tensor:
    """The error that each of the values may have."""
    sizes = values.abs()
    return tolerance * (sizes if relative_to == "itself" else sizes.max().expand_as(sizes))


def _result(
    run: Krylov,
    noise: float,
    tolerance: float,
    relative_to: Scale,
    risk: float,
    vectors: int,
) -> Lanczos:
    values, small = ritz(run.diagonal, run.beside)
    residuals = run.beside[-1] * small[-1].abs()
    allowed = _allowed(values, tolerance, relative_to)
    errors = _errors(run, values, small, risk)
    # With the whole space searched there is nothing more to find, if the products are exact.
    scale = float(values.abs().max())
    complete = run.steps == run.operator.size and noise <= EXACT * run.rounding(scale)

    def extreme(end: int) -> Extreme:
        error, room = errors[end] + noise, float(allowed[-end])
        reached = complete or (tolerance > 0 and error <= room)
        return Extreme(float(values[-end]), error, float(residuals[-end]), room, reached)

    chosen = torch.arange(len(values))
    if 2 * vectors < len(values):
        chosen = torch.cat([chosen[:vectors], chosen[len(values) - vectors :]])
    rows = run.basis
    rows.truncate(run.steps)
    return Lanczos(
        values=values,
        residuals=residuals,
        converged=residuals + noise <= allowed,
        weights=small[0].square(),
        smallest=extreme(0),
        largest=extreme(1),
        vectors=rows.combine(small[:, chosen].T) if vectors else None,
        vector_values=values[chosen] if vectors else values[:0],
        diagonal=torch.tensor(run.diagonal, dtype=torch.float64),
        beside=torch.tensor(run.beside, dtype=torch.float64),
        steps=run.steps,
        products=run.products,
        restarts=len(run.starts) - 1,
        noise=noise,
        risk=risk,
        about=run.operator.about,
    )


def _start(operator: Operator, seed: int, start: Tensor | None) -> Tensor:
    if start is None:
        return random_unit(operator.size, seed, operator.dtype, operator.device)
    operator._check(start, (operator.size,))
    length = torch.linalg.vector_norm(start, dtype=scalar_dtype(start.device))
    if not (torch.isfinite(length) and length > 0):
        raise ValueError(f"start must be finite and not 0, got a vector of norm {float(length)}")
    unit: Tensor = start / length.to(start.dtype)
    return unit


def _check(
    tolerance: float, relative_to: str, ends: str, max_products: int, risk: float, vectors: int
) -> None:
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance must be finite and at least 0, got {tolerance!r}")
    if relative_to not in ("largest", "itself"):
        raise ValueError(f'relative_to must be "largest" or "itself", got {relative_to!r}')
    if ends not in ("both", "smallest", "largest"):
        raise ValueError(f'ends must be "both", "smallest" or "largest", got {ends!r}')
    if not isinstance(max_products, int) or isinstance(max_products, bool) or max_products < 1:
        raise ValueError(f"max_products must be an integer from 1, got {max_products!r}")
    if not 0 < risk < 1:
        raise ValueError(f"risk must lie between 0 and 1, got {risk!r}")
    if not isinstance(vectors, int) or isinstance(vectors, bool) or vectors < 0:
        raise ValueError(f"vectors must be an integer from 0, got {vectors!r}")
