"""Random matrices and small networks with known ends, and how many errors may be too small.

`matrix_ends(seed)` and `network_ends(seed)` measure one random problem each and return both ends
beside the truth. Over many seeds, at most `allowed_outside` of them may lie outside their errors.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from neumann.spectrum import Differences, Extremes, FunctionOperator, Hessian, Operator, extremes
from tests.support.small_networks import Pair, as_type, batch, dense_hessian

RISK = 1e-3  # the default of `extremes`
NOISES = ("none", "fresh", "fixed", "one column")


@dataclass(frozen=True)
class End:
    """A measured end and the truth."""

    problem: str
    value: float
    error: float
    converged: bool
    truth: float

    @property
    def outside(self) -> bool:
        # Beyond the rounding of the dense eigenvalues that the truth comes from.
        return abs(self.value - self.truth) > self.error + 1e-13 * abs(self.truth)


def ends_of(found: Extremes, truth: Tensor, problem: str) -> list[End]:
    """Return both ends, for all eigenvalues of the true matrix."""
    pairs = ((found.smallest, truth.min()), (found.largest, truth.max()))
    return [End(problem, e.value, e.error, e.converged, float(t)) for e, t in pairs]


def allowed_outside(ends: int, risk: float = RISK, doubt: float = 1e-6) -> int:
    """Return the most ends that may lie outside if each does so with probability `risk`.

    More than that has probability below `doubt`, by the binomial distribution.
    """
    at_least, count = 1.0, 0  # the probability of `count` or more
    term = (1 - risk) ** ends  # the probability of exactly `count`
    while at_least - term > doubt:
        at_least -= term
        term *= (ends - count) / (count + 1) * risk / (1 - risk)
        count += 1
    return count


def random_spectrum(generator: torch.Generator, size: int) -> Tensor:
    """Return eigenvalues of one of six kinds, the largest |λ| of which is 1."""

    def uniform(count: int = size) -> Tensor:
        return torch.rand(count, generator=generator, dtype=torch.float64)

    normal = torch.randn(size, generator=generator, dtype=torch.float64)
    kind = int(torch.randint(6, (), generator=generator))
    if kind == 0:  # a bulk at 0 and some outliers, as in networks
        values = 0.01 * normal
        few = min(size, 5)
        values[:few] = 1.2 * uniform(few) - 0.2
    elif kind == 1:  # low rank
        values = torch.zeros(size, dtype=torch.float64)
        few = min(size, 3)
        values[:few] = 2 * uniform(few) - 1
    elif kind == 2:  # two clusters
        values = torch.where(uniform() < 0.5, 1 - 0.01 * uniform(), -1 + 0.01 * uniform())
    elif kind == 3:  # many scales
        values = normal.sign() * 10 ** (-6 * uniform())
    else:
        values = normal if kind == 4 else 2 * uniform() - 1
    return values / values.abs().max()


def noisy_operator(
    values: Tensor, noise: float, kind: str, generator: torch.Generator
) -> FunctionOperator:
    """Return diag(values) with products that are wrong by about this part of their length.

    "fresh" errors differ each time, "fixed" ones come from a matrix that is not symmetric, and with
    "one column" a single product is wrong.
    """
    size, calls = len(values), [0]
    matrix = torch.randn(size, size, generator=generator, dtype=torch.float64) / math.sqrt(size)
    wrong = int(torch.randint(min(size, 6), (), generator=generator))

    def multiply(vector: Tensor) -> Tensor:
        product = values * vector
        calls[0] += 1
        if kind == "none" or (kind == "one column" and calls[0] - 1 != wrong):
            return product
        if kind == "fixed":
            return product + noise * (matrix @ vector)
        error = torch.randn(size, generator=generator, dtype=torch.float64)
        return product + error * (noise * product.norm() / error.norm())

    return FunctionOperator(multiply, size, dtype=torch.float64)


def matrix_ends(seed: int, largest: int = 80) -> list[End]:
    """Measure a random matrix of 2 to `largest` rows, half of the time a tiny one."""
    generator = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    size = pick(2, 6) if pick(0, 1) else pick(2, largest)
    values = random_spectrum(generator, size)
    kind, noise = NOISES[pick(0, len(NOISES) - 1)], 10.0 ** -pick(2, 6) * pick(1, 9)
    tolerance = (1e-3, 1e-2, 1e-1)[pick(0, 2)]
    operator = noisy_operator(values, noise, kind, generator)
    found = extremes(operator, seed=seed, tolerance=tolerance)
    return ends_of(found, values, f"matrix {seed}: {size} rows, {kind} noise of {noise:g}")


def shift_features(model: nn.Sequential, pair: Pair, ratio: float) -> None:
    """Move the features of every BatchNorm layer to a mean of this many standard deviations."""
    with torch.no_grad():
        for index, layer in enumerate(model):
            if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
                features = model[:index](pair[0])
                over = [0, *range(2, features.ndim)]
                model[index - 1].bias.add_(
                    ratio * features.std(over, correction=0) - features.mean(over)
                )


def random_network(
    seed: int, *, examples: int, hidden: int, layers: int = 1, kinks: bool = False
) -> tuple[nn.Sequential, Pair]:
    """Return a network with BatchNorm and its batch, in float64."""
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    before = 6
    for _ in range(layers):
        activation = nn.ReLU() if kinks else nn.Tanh()
        parts += [nn.Linear(before, hidden), nn.BatchNorm1d(hidden), activation]
        before = hidden
    model = nn.Sequential(*parts, nn.Linear(before, 3)).double()
    return model, batch(examples, 6, seed=seed)


def network_ends(seed: int) -> list[End]:
    """Measure a random network with BatchNorm: features far from 0, or kinks and differences."""
    generator = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    dtype = (torch.float32, torch.float64)[pick(0, 3) // 3]
    by_differences, kinks = pick(0, 1) == 1, pick(0, 1) == 1
    model, pair = random_network(
        seed, examples=pick(4, 12), hidden=pick(3, 8), layers=pick(1, 2), kinks=kinks
    )
    ratio = 10.0 ** pick(0, 2) * pick(1, 9)
    shift_features(model, pair, ratio)
    model, pair = model.to(dtype), as_type(pair, dtype)
    operator: Operator = (Differences if by_differences else Hessian)(
        model, cross_entropy, batch=pair
    )
    truth = torch.linalg.eigvalsh(dense_hessian(model, pair))
    found = extremes(operator, seed=seed, tolerance=(1e-3, 1e-2)[pick(0, 1)])
    name = type(operator).__name__
    return ends_of(found, truth, f"network {seed}: {name}, {dtype}, kinks {kinks}, ratio {ratio:g}")
