"""Variants of the spectral preconditioner. `spectral_variants` measures what each would gain.

They use the protocol of `neumann.optim.preconditioners`, as a user's own preconditioner would.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from neumann.optim.preconditioners import Diagonal, Momentum, Spectral
from neumann.optim.preconditioners.orthogonalization import is_matrix
from neumann.optim.preconditioners.protocol import States
from neumann.optim.preconditioners.spectral import vector_state

# Average the gradients over fewer or more steps, or none, before orthogonalizing.
without_momentum = partial(Spectral, before=None)
short_momentum = partial(Spectral, before=Momentum(0.3))
long_momentum = partial(Spectral, before=Momentum(0.8))
# Biases and normalization at the pace of AdamW with the same learning rate.
quick_vectors = partial(Spectral, vectors=Diagonal(scale=1.0))


@dataclass(frozen=True)
class Polished(Spectral):
    """UVᵀ to three digits: three more iterations, cubic ones, bring the singular values to 1."""

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        found = super().apply(gradients, states)
        for i, direction in enumerate(found):
            if is_matrix(direction):
                wide = _widen(direction)
                size = self.scale * max(wide.shape) ** 0.5
                x = wide / size
                for _ in range(3):
                    x = 1.5 * x - 0.5 * (x @ x.mT) @ x
                found[i] = _restore(x * size, direction)
        return found


@dataclass(frozen=True)
class FirstDiagonal(Spectral):
    """The first convolution, which has three input channels, in the diagonal form."""

    def elementwise(self, parameter: Tensor) -> bool:
        return not is_matrix(parameter) or (parameter.ndim == 4 and parameter.shape[1] == 3)


@dataclass(frozen=True)
class ClassifierDiagonal(Spectral):
    """The classifier, the only matrix besides the convolutions, in the diagonal form."""

    def elementwise(self, parameter: Tensor) -> bool:
        return not is_matrix(parameter) or parameter.ndim == 2


@dataclass(frozen=True)
class EqualRows(Spectral):
    """Each row of UVᵀ is divided by its running root mean square, as in NorMuon (2025)."""

    decay: float = 0.95

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        state = super().create(parameter)
        if is_matrix(parameter):
            state["rows"] = parameter.new_zeros(parameter.shape[0], 1)
            state["seen"] = torch.zeros((), device=parameter.device)
        return state

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        found = super().apply(gradients, states)
        for i, (direction, state) in enumerate(zip(found, states, strict=True)):
            if "rows" in state:
                matrix = direction.flatten(1)
                squares = matrix.square().mean(1, keepdim=True)
                equal = matrix / (_average(state, "rows", squares, self.decay).sqrt() + 1e-8)
                equal = equal * (matrix.norm() / equal.norm())
                found[i] = equal.reshape(direction.shape)
        return found


@dataclass(frozen=True)
class Accumulated(Spectral):
    """L^{-1/2}G with L the moving average of GGᵀ: one-sided Shampoo. Decay 0 gives UVᵀ."""

    decay: float = 0.9

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        state = super().create(parameter)
        if is_matrix(parameter):
            size = min(_widen(parameter).shape)
            state["gram"] = parameter.new_zeros(size, size)
            state["seen"] = torch.zeros((), device=parameter.device)
        return state

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        found: list[Tensor] = []
        for gradient, state in zip(gradients, states, strict=True):
            if "gram" not in state:
                found += self.vectors.apply([gradient], [vector_state(state)])
                continue
            wide = _widen(gradient)
            average = _average(state, "gram", wide @ wide.mT, self.decay)
            direction = self._find_direction(wide, average, state)
            found.append(_restore(direction * self.scale * max(wide.shape) ** 0.5, gradient))
        return found

    def _find_direction(self, wide: Tensor, average: Tensor, state: dict[str, Tensor]) -> Tensor:
        values, vectors = torch.linalg.eigh(average)
        values = values.clamp(min=1e-8 * float(values[-1]))
        direction: Tensor = vectors @ ((vectors.mT @ wide) / values.sqrt()[:, None])
        return direction


@dataclass(frozen=True)
class Rotated(Accumulated):
    """Adam in the eigenbasis of L: one-sided SOAP (2024)."""

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        state = super().create(parameter)
        if is_matrix(parameter):
            state["squares"] = parameter.new_zeros(_widen(parameter).shape)
        return state

    def _find_direction(self, wide: Tensor, average: Tensor, state: dict[str, Tensor]) -> Tensor:
        vectors = torch.linalg.eigh(average).eigenvectors
        rotated = vectors.mT @ wide
        state["squares"].mul_(self.decay).addcmul_(rotated, rotated, value=1 - self.decay)
        squares = state["squares"] / (1 - self.decay ** state["seen"])
        direction: Tensor = vectors @ (rotated / (squares.sqrt() + 1e-12))
        direction /= max(direction.shape) ** 0.5  # elements as large as in an orthogonal matrix
        return direction


briefly_accumulated = partial(Accumulated, decay=0.5)  # over two steps


def _widen(tensor: Tensor) -> Tensor:
    """The tensor as a matrix with no more rows than columns."""
    matrix = tensor.flatten(1)
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT


def _restore(wide: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_widen`."""
    return (wide if wide.shape[0] == like.shape[0] else wide.mT).reshape(like.shape)


def _average(state: dict[str, Tensor], name: str, new: Tensor, decay: float) -> Tensor:
    """Update a moving average and the count of steps; the average with bias correction."""
    seen = state["seen"].add_(1)
    state[name].mul_(decay).add_(new, alpha=1 - decay)
    return state[name] / (1 - decay**seen)
