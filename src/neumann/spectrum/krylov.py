"""The vectors and the tridiagonal matrix of a Lanczos run, as they grow.

    βⱼvⱼ₊₁ = Hvⱼ − αⱼvⱼ − βⱼ₋₁vⱼ₋₁

computed by orthogonalising Hvⱼ against all vectors so far. Scalars stay on the device until
somebody looks, several steps at a time, so that no step waits for the host. A breakdown, β = 0 to
rounding, is noticed at the next look: the steps after it are undone, and the run can be restarted
in a new random direction. T then has a 0 beside its diagonal, but the β of the matrix is only known
to be at most `hidden`: see `tridiagonal` for what may lie behind it.

**Noise.** Of an exactly symmetric H the coefficients of Hvⱼ along v₁ … vⱼ₋₂ are 0 and the one along
vⱼ₋₁ is βⱼ₋₁. What they differ by is the asymmetry of the computed products: rounding, TF32,
atomics, dropout that was not fixed. But rounding in the forward pass changes the loss itself, which
leaves no asymmetry; in networks in float32 λ was off by up to 1.7 times the norm of the asymmetry
over all steps. Four times that norm, some units of rounding, and what the operator says about its
own error, are the noise: T is that of a matrix so near to H.
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from neumann.spectrum.basis import Basis, scalar_dtype
from neumann.spectrum.operators import NonFiniteProduct, Operator
from neumann.spectrum.start import random_unit

UNSEEN = 4.0  # noise per measured asymmetry
ROUNDING = 32.0  # units of rounding, times ‖T‖, that are noise at the very least
BREAKDOWN = 4.0  # units of rounding, times ‖T‖, below which β is not told from 0


@dataclass
class Krylov:
    """The state of a run; scalars stay on the device until somebody looks."""

    operator: Operator
    first: Tensor
    seed: int
    host: bool
    products: int = 0
    broken: bool = False  # the last β is 0 to rounding
    starts: list[int] = field(default_factory=lambda: [0])  # steps done before each random vector
    diagonal: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    asymmetry: list[float] = field(default_factory=list)  # squared, of each step

    def __post_init__(self) -> None:
        op = self.operator
        self.basis = Basis(op.size, op.dtype, op.device, self.host)
        self.basis.append(self.first)
        self.current = self.first
        self.pending: list[Tensor] = []  # (3,) α, β, asymmetry² of steps not looked at

    @property
    def steps(self) -> int:
        return len(self.diagonal) + len(self.pending)

    def advance(self, count: int) -> None:
        """Some steps, none of which waits for the device."""
        tiny = torch.finfo(self.operator.dtype).tiny
        wide = scalar_dtype(self.operator.device)
        for _ in range(min(count, self.operator.size - self.steps)):
            known = self.pending[-1][1] if self.pending else None
            before = self.beside[-1] if known is None and self.beside else known
            rest, along = self.basis.without(self.operator.product(self.current))
            self.products += 1
            off = along[:-1].clone()
            if before is not None:
                off[-1] -= before
            # In two steps: of numbers below 1e-154 the squares would be none.
            largest = torch.linalg.vector_norm(rest, math.inf).clamp(min=tiny)
            length = torch.linalg.vector_norm(rest.div_(largest), dtype=wide)
            self.pending.append(torch.stack([along[-1], length * largest, off.square().sum()]))
            self.current = rest.div_(length.clamp(min=1).to(rest.dtype))
            if self.steps < self.operator.size:
                self.basis.append(self.current)

    def look(self) -> None:
        """Fetch what the last steps found; undo those after a breakdown."""
        numbers = self.operator.agree(torch.stack(self.pending).cpu().double()).tolist()
        self.pending = []
        unit = torch.finfo(self.operator.dtype).eps
        for alpha, beta, asymmetry in numbers:
            if not (math.isfinite(alpha) and math.isfinite(beta)):
                raise NonFiniteProduct(
                    f"product {len(self.diagonal) + 1} with the {self.operator.about.matrix} holds "
                    "NaN or infinity: the loss is not finite at these weights, or its second "
                    "derivatives overflow"
                )
            self.diagonal.append(alpha)
            self.asymmetry.append(asymmetry)
            scale = max(map(abs, (*self.diagonal, *self.beside)))
            self.broken = beta <= BREAKDOWN * unit * max(scale, beta)
            self.beside.append(0.0 if self.broken else beta)
            if self.broken or len(self.diagonal) == self.operator.size:
                self.beside[-1] = 0.0
                self.basis.truncate(len(self.diagonal))
                return

    def restart(self) -> bool:
        """A new random direction orthogonal to all others; False if there is none."""
        op, wide = self.operator, scalar_dtype(self.operator.device)
        for attempt in range(3):
            draw = 3 * len(self.starts) + attempt
            rest, _ = self.basis.without(random_unit(op.size, self.seed, op.dtype, op.device, draw))
            length = float(torch.linalg.vector_norm(rest, dtype=wide))
            if length > 1e-3 / math.sqrt(op.size):
                rest, _ = self.basis.without(rest.div_(length))  # once more, as it was shortened
                self.current = rest.div_(torch.linalg.vector_norm(rest, dtype=wide).to(op.dtype))
                self.basis.append(self.current)
                self.broken = False
                self.starts.append(len(self.diagonal))
                return True
        return False

    def parts(self) -> list[tuple[list[float], list[float]]]:
        """α and β of each random vector's own steps."""
        edges = [*self.starts, len(self.diagonal)]
        return [(self.diagonal[i:j], self.beside[i:j]) for i, j in pairwise(edges)]

    def hidden(self, scale: float) -> float:
        """The largest β that may be behind a breakdown."""
        return BREAKDOWN * torch.finfo(self.operator.dtype).eps * scale

    def noise(self, scale: float) -> float:
        """‖error of T‖: the measured asymmetry, and no less than some units of rounding."""
        return UNSEEN * math.sqrt(sum(self.asymmetry)) + self.rounding(scale)

    def rounding(self, scale: float) -> float:
        """The least noise there is."""
        return ROUNDING * torch.finfo(self.operator.dtype).eps * scale
