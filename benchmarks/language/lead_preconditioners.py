"""Preconditioners of the leads: what may come before the polar step, and what after it.

They use the protocol of `neumann.optim.preconditioners`, as a user's own preconditioner would. With
a strength of 0 each leaves the directions as they are, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neumann.optim.preconditioners import Momentum, Preconditioner, Spectral
from neumann.optim.preconditioners.protocol import States

EIGENVALUE_FLOOR = 1e-5  # as a share of the largest
REFRESH_STEPS = 10


@dataclass(frozen=True)
class SlowSum:
    """g + fast·b + weight·s, with sums b ← fast·b + g and s ← slow·s + g of past gradients.

    Nesterov momentum and a slow sum beside it. The slow one counts for little in the first steps,
    so there is nothing to start or to correct.
    """

    fast: float
    slow: float
    weight: float

    name = "slow sum"

    def elementwise(self, parameter: Tensor) -> bool:
        return True

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        fast = Momentum(self.fast).create(parameter)
        return {**fast, "slow": torch.zeros_like(fast["past"])}

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        found = Momentum(self.fast).apply(gradients, states)
        for direction, gradient, state in zip(found, gradients, states, strict=True):
            direction.add_(state["slow"].mul_(self.slow).add_(gradient), alpha=self.weight)
        return found


@dataclass(frozen=True)
class ScaledRows:
    """Each row, one for each output, divided by its norm to a power.

    This is the diagonal of the whitening with MMᵀ, and costs next to nothing.
    """

    power: float
    before: Preconditioner | None = None

    name = "scaled rows"

    def elementwise(self, parameter: Tensor) -> bool:
        return False

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        return {}

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        norms = [m.norm(dim=1, keepdim=True).clamp(min=1e-30) for m in gradients]
        return [m / norm**self.power for m, norm in zip(gradients, norms, strict=True)]


@dataclass(frozen=True)
class Whitened:
    """L^-power M R^-power, with L and R the moving means of MMᵀ and MᵀM, and the norm of M.

    M is what comes out of `before`. The polar step that follows keeps of this only how M is turned:
    with L = MMᵀ and R = MᵀM of the same step it would change nothing. `sides` is "both", "left"
    alone, that of the outputs, or "shorter": of a matrix that is not square that side alone, where
    a decomposition takes a fraction of the time. One side alone has twice the power. The powers are
    found by eigh, every ten steps and after 1, 2 and 4. This waits for the device, and takes its
    time.
    """

    power: float
    before: Preconditioner | None = None
    sides: str = "both"
    decay: float = 0.95

    name = "whitened"

    def elementwise(self, parameter: Tensor) -> bool:
        return False

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        state = {"calls": torch.zeros((), device=parameter.device)}
        for name, size in self._find_sides(parameter).items():
            for part in ("gram", "root"):
                state[f"{name}_{part}"] = torch.zeros(size, size, device=parameter.device)
        return state

    def _find_sides(self, matrix: Tensor) -> dict[str, int]:
        """The sides to whiten, and their sizes."""
        rows, columns = matrix.shape
        sides = {"left": rows, "right": columns}
        if self.sides == "left":
            del sides["right"]
        elif self.sides == "shorter" and rows != columns:
            del sides["left" if rows > columns else "right"]
        return sides

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        if self.power == 0:
            return [gradient.clone() for gradient in gradients]
        for m, state in zip(gradients, states, strict=True):
            for side in self._find_sides(m):
                gram = m @ m.mT if side == "left" else m.mT @ m
                state[f"{side}_gram"].lerp_(gram, 1 - self.decay)
        seen = [int(state["calls"].add_(1)) for state in states]
        due = [s for s, count in zip(states, seen, strict=True) if is_due(count)]
        self._refresh(due)
        found = []
        for m, state in zip(gradients, states, strict=True):
            white = state["left_root"] @ m if "left_root" in state else m
            white = white @ state["right_root"] if "right_root" in state else white
            found.append(white * (m.norm() / white.norm().clamp(min=1e-30)))
        return found

    def _refresh(self, states: States) -> None:
        """The powers of all matrices, those of one size in one batch."""
        by_size: dict[tuple[int, float], list[tuple[Tensor, Tensor]]] = {}
        for state in states:
            sides = [name for name in ("left", "right") if f"{name}_gram" in state]
            for name in sides:
                pair = state[f"{name}_gram"], state[f"{name}_root"]
                power = self.power * (2 / len(sides))  # the same in all
                by_size.setdefault((len(pair[0]), power), []).append(pair)
        for (_, power), pairs in by_size.items():
            values, vectors = torch.linalg.eigh(torch.stack([gram for gram, _ in pairs]))
            largest = values[:, -1:].clamp(min=1e-30)
            values = (values / largest).clamp(min=EIGENVALUE_FLOOR) ** -power
            roots = (vectors * values[:, None]) @ vectors.mT
            for (_, root), new in zip(pairs, roots, strict=True):
                root.copy_(new)


def is_due(seen: int) -> bool:
    """Whether a matrix is decomposed in its step number `seen`, counted from 1."""
    return seen % REFRESH_STEPS == 0 or seen in (1, 2, 4)


@dataclass(frozen=True)
class EvenRows(Spectral):
    """Each row of UVᵀ is divided by its running root mean square to a power; NorMuon has 1.

    The norm of the whole stays.
    """

    power: float = 1.0
    decay: float = 0.95

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        rows = torch.zeros(parameter.shape[0], 1, device=parameter.device)
        return {**super().create(parameter), "rows": rows}

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        found = super().apply(gradients, states)
        if self.power == 0:
            return found
        for i, (direction, state) in enumerate(zip(found, states, strict=True)):
            squares = direction.square().mean(1, keepdim=True)
            # Without bias correction: it is the same for all rows, and the norm is restored.
            mean = state["rows"].lerp_(squares, 1 - self.decay)
            even = direction / mean.clamp(min=1e-30) ** (self.power / 2)
            found[i] = even * (direction.norm() / even.norm().clamp(min=1e-30))
        return found
