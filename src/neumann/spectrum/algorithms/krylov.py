"""The growing basis and tridiagonal matrix of a Lanczos run.

    βⱼvⱼ₊₁ = Hvⱼ − αⱼvⱼ − βⱼ₋₁vⱼ₋₁        by orthogonalizing Hvⱼ against all vectors so far

The scalars stay on the device until `fetch` reads those of several steps at once. It also detects a
breakdown (β = 0 up to rounding) and undoes the steps after it; `restart` continues in a new random
direction. T then has a 0 where the matrix's β is only known to be at most `hidden`.

**Noise.** If H were exactly symmetric, the coefficients of Hvⱼ along v₁ … vⱼ₋₂ would be 0 and the
one along vⱼ₋₁ would be βⱼ₋₁. The difference is the asymmetry of the products: rounding, TF32,
atomics, dropout that was not fixed. In float32 networks λ was off by up to 1.7 times its norm over
all steps. The noise is four times that norm plus a few units of rounding.

A few steps show only a few of these differences, and by chance all of them may be small.
`few_steps_factor` says how many times their norm the error of T is then at most. It is above four
for up to about six steps.
"""

import math
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from neumann.spectrum.algorithms.basis import Basis
from neumann.spectrum.operators.symmetric import Operator
from neumann.spectrum.operators.vectors import random_unit, scalar_dtype

NOISE_PER_ASYMMETRY = 4.0
ROUNDING_UNITS = 32.0  # times eps·‖T‖: the least possible noise
BREAKDOWN_UNITS = 4.0  # times eps·‖T‖: a smaller β may be 0


class Krylov:
    """The state of a Lanczos run."""

    def __init__(self, operator: Operator, first: Tensor, seed: int, host: bool) -> None:
        self.operator, self.seed = operator, seed
        self.basis = Basis(operator.size, operator.dtype, operator.device, host)
        self.basis.append(first)
        self.current = first
        self.products = 0
        self.broken = False  # the last β is 0 up to rounding
        self.starts = [0]  # steps taken before each random vector
        self.diagonal: list[float] = []
        self.off_diagonal: list[float] = []
        self.asymmetry: list[float] = []  # squared, per step
        self.pending: list[Tensor] = []  # (3,) α, β, asymmetry² of steps not fetched yet
        self._beta: Tensor | float = 0.0  # of the last step
        self._eps = torch.finfo(operator.dtype).eps

    @property
    def steps(self) -> int:
        return len(self.diagonal) + len(self.pending)

    def advance(self, count: int) -> None:
        """Take up to `count` steps without waiting for the device."""
        tiny = torch.finfo(self.operator.dtype).tiny
        wide = scalar_dtype(self.operator.device)
        for _ in range(min(count, self.operator.size - self.steps)):
            rest, along = self.basis.orthogonalize(self.operator.product(self.current))
            self.products += 1
            asymmetry = along[:-1].clone()
            asymmetry[-1:] -= self._beta
            # Divide by the largest entry first: squares of numbers below 1e-154 underflow.
            largest = torch.linalg.vector_norm(rest, math.inf).clamp(min=tiny)
            length = torch.linalg.vector_norm(rest.div_(largest), dtype=wide)
            beta = length * largest
            self._beta = beta
            self.pending.append(torch.stack([along[-1], beta, asymmetry.square().sum()]))
            self.current = rest.div_(length.clamp(min=1).to(rest.dtype))
            if self.steps < self.operator.size:
                self.basis.append(self.current)

    def fetch(self) -> None:
        """Read the scalars of the last steps, and undo the steps after a breakdown."""
        numbers = self.operator.agree(torch.stack(self.pending).cpu().double()).tolist()
        self.pending = []
        for alpha, beta, asymmetry in numbers:
            if not (math.isfinite(alpha) and math.isfinite(beta)):
                raise self.operator.nonfinite_error(f"product {len(self.diagonal) + 1}")
            self.diagonal.append(alpha)
            self.asymmetry.append(asymmetry)
            scale = max(map(abs, (*self.diagonal, *self.off_diagonal)))
            self.broken = beta <= self.hidden(max(scale, beta))
            done = self.broken or len(self.diagonal) == self.operator.size
            self.off_diagonal.append(0.0 if done else beta)
            if done:
                self.basis.truncate(len(self.diagonal))
                break
        self._beta = self.off_diagonal[-1]

    def restart(self) -> bool:
        """Continue in a new random direction orthogonal to all others; False if there is none."""
        op, wide = self.operator, scalar_dtype(self.operator.device)
        for attempt in range(3):
            draw = 3 * len(self.starts) + attempt
            direction = random_unit(op.size, self.seed, op.dtype, op.device, draw)
            rest, _ = self.basis.orthogonalize(direction)
            length = float(torch.linalg.vector_norm(rest, dtype=wide))
            if length > 1e-3 / math.sqrt(op.size):
                # Again, because dividing by a small length magnifies the rounding.
                rest, _ = self.basis.orthogonalize(rest.div_(length))
                self.current = rest.div_(torch.linalg.vector_norm(rest, dtype=wide).to(op.dtype))
                self.basis.append(self.current)
                self.broken = False
                self.starts.append(len(self.diagonal))
                return True
        return False

    def segments(self) -> list[tuple[list[float], list[float]]]:
        """Return α and β of the steps from each random vector."""
        edges = [*self.starts, len(self.diagonal)]
        return [(self.diagonal[i:j], self.off_diagonal[i:j]) for i, j in pairwise(edges)]

    def hidden(self, scale: float) -> float:
        """Return the largest β that cannot be distinguished from 0, for this ‖T‖."""
        return BREAKDOWN_UNITS * self._eps * scale

    def noise(self, scale: float) -> float:
        """Return ‖error of T‖: the measured asymmetry and some rounding."""
        return NOISE_PER_ASYMMETRY * math.sqrt(sum(self.asymmetry)) + self.rounding(scale)

    def few_steps_noise(self, risk: float) -> float:
        """Return ‖error of T‖ where chance may have hidden the asymmetry, except with the risk."""
        return few_steps_factor(self.steps, risk) * math.sqrt(sum(self.asymmetry))

    def rounding(self, scale: float) -> float:
        """Return the least possible noise."""
        return ROUNDING_UNITS * self._eps * scale


@lru_cache
def few_steps_factor(steps: int, risk: float) -> float:
    """Return how many times the norm of the asymmetry ‖error of T‖ is at most, except with a risk.

    Let fᵢⱼ be the component along vᵢ of the error of product j. T takes f from its lower triangle
    and the diagonal; the asymmetry shows fᵢⱼ − fⱼᵢ. Take the f as independent and normal.

    - All products equally noisy: fᵢⱼ + fⱼᵢ and the diagonal, M = k(k+1)/2 numbers, are independent
      of the m = k(k−1)/2 differences. ‖error‖ ≤ (ratio + 1)/√2 times the norm of the differences.
    - One product noisy: its k − 1 components along the other vectors are seen, the one along its
      own is not. ‖error‖ ≤ ratio + 1 times that norm, with M = 1 and m = k − 1.

    `ratio` bounds √(χ²_M/χ²_m), because P(χ²_m < x) ≤ (x/2)^{m/2}/Γ(m/2 + 1).
    """
    if steps < 2:
        return 0.0  # nothing to compare

    def ratio(unseen: int, seen: int) -> float:
        log = math.lgamma((unseen + seen) / 2) - math.lgamma(unseen / 2) - math.lgamma(seen / 2 + 1)
        return math.exp((log - math.log(risk)) / seen)

    pairs = steps * (steps - 1) // 2
    alike = (ratio(pairs + steps, pairs) + 1) / math.sqrt(2)
    return max(alike, ratio(1, steps - 1) + 1)
