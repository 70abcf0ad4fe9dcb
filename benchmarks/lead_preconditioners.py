"""Preconditioners that were tried beside the spectral one, each written against the protocol.

None of them is in the library: `leads` measures what they would add.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neumann.optim.preconditioners import Diagonal, Momentum, States
from neumann.optim.spectral import Spectral, is_matrix, vector_state


def without_momentum() -> Spectral:
    """The orthogonalised gradient of this step alone."""
    return Spectral(before=None)


def short_momentum() -> Spectral:
    """With a shorter memory before it."""
    return Spectral(before=Momentum(0.3))


def long_momentum() -> Spectral:
    """With a longer memory before it."""
    return Spectral(before=Momentum(0.8))


def quick_vectors() -> Spectral:
    """Biases and normalisation as fast as AdamW would take them at this learning rate."""
    return Spectral(vectors=Diagonal(scale=1.0))


@dataclass(frozen=True)
class Polished(Spectral):
    """UVᵀ to three digits: three iterations more, of the cubic kind, take values to 1."""

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        found = super().apply(gradients, states)
        for i, direction in enumerate(found):
            if is_matrix(direction):
                matrix = direction.flatten(1)
                size = self.scale * max(matrix.shape) ** 0.5
                x = matrix / size if matrix.shape[0] <= matrix.shape[1] else matrix.mT / size
                for _ in range(3):
                    x = 1.5 * x - 0.5 * (x @ x.mT) @ x
                x = x if matrix.shape[0] <= matrix.shape[1] else x.mT
                found[i] = (x * size).reshape(direction.shape)
        return found


@dataclass(frozen=True)
class FirstDiagonal(Spectral):
    """The first convolution, the one that sees three channels, in diagonal form."""

    def elementwise(self, parameter: Tensor) -> bool:
        return not is_matrix(parameter) or (parameter.ndim == 4 and parameter.shape[1] == 3)


@dataclass(frozen=True)
class ClassifierDiagonal(Spectral):
    """The classifier, the one matrix that is no convolution, in diagonal form."""

    def elementwise(self, parameter: Tensor) -> bool:
        return not is_matrix(parameter) or parameter.ndim == 2


@dataclass(frozen=True)
class EqualRows(Spectral):
    """Every row of UVᵀ divided by the root mean square it has had, as in NorMuon (2025)."""

    decay: float = 0.95

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        state = super().create(parameter)
        if is_matrix(parameter):
            state |= {"rows": parameter.new_zeros(parameter.shape[0], 1), "seen": _count(parameter)}
        return state

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        found = super().apply(gradients, states)
        for i, (direction, state) in enumerate(zip(found, states, strict=True)):
            if "rows" in state:
                matrix = direction.flatten(1)
                seen = state["seen"].add_(1)
                squares = matrix.square().mean(1, keepdim=True)
                state["rows"].mul_(self.decay).add_(squares, alpha=1 - self.decay)
                even = matrix / ((state["rows"] / (1 - self.decay**seen)).sqrt() + 1e-8)
                even = even * (matrix.norm() / even.norm())
                found[i] = even.reshape(direction.shape)
        return found


@dataclass(frozen=True)
class Accumulated(Spectral):
    """L^{-1/2}G, with L the moving mean of GGᵀ: Shampoo of one side; decay 0 would be UVᵀ."""

    decay: float = 0.9

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        state = super().create(parameter)
        if is_matrix(parameter):
            rows = parameter.shape[0]
            size = min(rows, parameter.numel() // rows)
            state |= {"gram": parameter.new_zeros(size, size), "seen": _count(parameter)}
        return state

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        found: list[Tensor] = []
        for gradient, state in zip(gradients, states, strict=True):
            if "gram" not in state:
                found += self.vectors.apply([gradient], [vector_state(state)])
                continue
            matrix = gradient.flatten(1)
            wide = matrix.shape[0] <= matrix.shape[1]
            short = matrix if wide else matrix.mT
            mean = _moving(state, short @ short.mT, self.decay)
            direction = self._direction(short, mean, state) * self.scale * max(matrix.shape) ** 0.5
            found.append((direction if wide else direction.mT).reshape(gradient.shape))
        return found

    def _direction(self, short: Tensor, mean: Tensor, state: dict[str, Tensor]) -> Tensor:
        values, vectors = torch.linalg.eigh(mean)
        values = values.clamp(min=1e-8 * float(values[-1]))
        direction: Tensor = vectors @ ((vectors.mT @ short) / values.sqrt()[:, None])
        return direction


@dataclass(frozen=True)
class Rotated(Accumulated):
    """Adam's division in the eigenbasis of L, as SOAP (2024) does it, of one side."""

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        state = super().create(parameter)
        if is_matrix(parameter):
            rows = parameter.shape[0]
            columns = parameter.numel() // rows
            state["squares"] = parameter.new_zeros(min(rows, columns), max(rows, columns))
        return state

    def _direction(self, short: Tensor, mean: Tensor, state: dict[str, Tensor]) -> Tensor:
        vectors = torch.linalg.eigh(mean).eigenvectors
        turned = vectors.mT @ short
        state["squares"].mul_(self.decay).addcmul_(turned, turned, value=1 - self.decay)
        squares = state["squares"] / (1 - self.decay ** state["seen"])
        direction: Tensor = vectors @ (turned / (squares.sqrt() + 1e-12))
        direction /= max(direction.shape) ** 0.5  # elements of the size of an orthogonal matrix's
        return direction


def briefly_accumulated() -> Accumulated:
    """With a memory of two steps."""
    return Accumulated(decay=0.5)


def _count(parameter: Tensor) -> Tensor:
    return torch.zeros((), device=parameter.device)


def _moving(state: dict[str, Tensor], gram: Tensor, decay: float) -> Tensor:
    """The moving mean of GGᵀ, corrected for its start."""
    seen = state["seen"].add_(1)
    state["gram"].mul_(decay).add_(gram, alpha=1 - decay)
    return state["gram"] / (1 - decay**seen)
