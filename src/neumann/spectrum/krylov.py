"""The vectors and the tridiagonal matrix of a Lanczos run, as they grow.

    βⱼvⱼ₊₁ = Hvⱼ − αⱼvⱼ − βⱼ₋₁vⱼ₋₁

computed by orthogonalising Hvⱼ against all vectors so far. Scalars stay on the device until
somebody looks, several steps at a time, so that no step waits for the host. A breakdown, β = 0 to
rounding, is noticed at the next look: the steps after it are undone, and the run can be restarted
in a new random direction.

**Noise.** Of an exactly symmetric H the coefficients of Hvⱼ along v₁ … vⱼ₋₂ are 0 and the one along
vⱼ₋₁ is βⱼ₋₁. What they differ by is the asymmetry of the computed products: rounding, TF32,
atomics, dropout that was not fixed. But rounding in the forward pass changes the loss itself, which
leaves no asymmetry; in networks in float32 λ was off by up to 1.7 times the norm of the asymmetry
over all steps. Four times that norm, some units of rounding, and what the operator says about its
own error, are the noise: T is that of a matrix so near to H.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from neumann.spectrum.basis import Basis, scalar_dtype
from neumann.spectrum.operators import NonFiniteProduct, Operator
from neumann.spectrum.start import random_unit

UNSEEN = 4.0  # noise per measured asymmetry
ROUNDING = 32.0  # units of rounding, times ‖T‖, that are noise at the very least
BREAKDOWN = 4.0  # units of rounding, times ‖T‖, below which β is 0


@dataclass
class Krylov:
    """The state of a run; scalars stay on the device until somebody looks."""

    operator: Operator
    first: Tensor
    seed: int
    host: bool
    products: int = 0
    restarts: int = 0
    broken: bool = False  # the last β is 0
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
            length = torch.linalg.vector_norm(rest, dtype=wide)
            self.pending.append(torch.stack([along[-1], length, off.square().sum()]))
            self.current = rest.div_(length.clamp(min=tiny).to(rest.dtype))
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
        op = self.operator
        for attempt in range(3):
            self.restarts += 1
            # Seeds far from those a caller counts up.
            seed = self.seed + 1_000_003 * (self.restarts + attempt)
            rest, _ = self.basis.without(random_unit(op.size, seed, op.dtype, op.device))
            length = float(torch.linalg.vector_norm(rest))
            if length > 1e-3 / math.sqrt(op.size):
                rest, _ = self.basis.without(rest.div_(length))  # once more, as it was shortened
                self.current = rest.div_(torch.linalg.vector_norm(rest))
                self.basis.append(self.current)
                self.broken = False
                return True
        return False

    def noise(self, scale: float) -> float:
        """‖error of T‖: the measured asymmetry, and no less than some units of rounding."""
        unit = torch.finfo(self.operator.dtype).eps
        return UNSEEN * math.sqrt(sum(self.asymmetry)) + ROUNDING * unit * scale
