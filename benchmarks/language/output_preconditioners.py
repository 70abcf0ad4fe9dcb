"""Other P for the output layer: they take its inputs together, not each by itself.

An output layer over a vocabulary is too tall to decompose on the side of the tokens, but its inputs
are as many as the network is wide. `RotatedDiagonal` is Adam's division in the basis of the
eigenvectors of the moving mean of MᵀM, where the elements of a gradient are less correlated: SOAP
on one side. `WhitenedRows` does without a second moment of every element.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.language.lead_preconditioners import EIGENVALUE_FLOOR, is_due
from neumann.optim.preconditioners import Diagonal, Preconditioner
from neumann.optim.preconditioners.protocol import States

GRAM_DECAY = 0.95  # of the moving mean of MᵀM


@dataclass(frozen=True)
class RotatedDiagonal:
    """The diagonal P in the basis of the eigenvectors of MᵀM.

    M is what comes out of `before`. Waits for the device.
    """

    decay: float = 0.95
    scale: float = 0.2
    before: Preconditioner | None = None

    name = "rotated diagonal"

    def elementwise(self, parameter: Tensor) -> bool:
        return False

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        return {**create_basis(parameter), **self._diagonal.create(parameter)}

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        for m, state in zip(gradients, states, strict=True):
            turn_basis(state, m, int(state["seen"]) + 1)
        bases = [state["basis"] for state in states]
        rotated = [m @ basis for m, basis in zip(gradients, bases, strict=True)]
        found = self._diagonal.apply(rotated, states)
        return [d @ basis.mT for d, basis in zip(found, bases, strict=True)]

    @property
    def _diagonal(self) -> Diagonal:
        return Diagonal(decay=self.decay, scale=self.scale)


@dataclass(frozen=True)
class WhitenedRows:
    """N·(NᵀN)^−½, where N has the rows of M divided by their root mean squares.

    M is what comes out of `before`. The root mean squares and NᵀN are moving means over the steps;
    with a `memory` of 0 they are those of the step, and this is the polar factor of N. The root
    mean square of a direction is about `scale`. Waits for the device.
    """

    memory: float = 0.95
    scale: float = 0.2
    before: Preconditioner | None = None

    name = "whitened rows"

    def elementwise(self, parameter: Tensor) -> bool:
        return False

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        tokens, width = parameter.shape
        shapes = {"rows": (tokens, 1), "gram": (width, width), "root": (width, width), "seen": ()}
        return {name: torch.zeros(shape, device=parameter.device) for name, shape in shapes.items()}

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        found = []
        for m, state in zip(gradients, states, strict=True):
            seen = int(state["seen"].add_(1))
            state["rows"].lerp_(m.square().mean(1, keepdim=True), 1 - self.memory)
            n = m / (state["rows"] / (1 - self.memory**seen)).sqrt().clamp(min=1e-30)
            state["gram"].lerp_(n.mT @ n / len(n), 1 - self.memory)
            if self.memory == 0 or is_due(seen):
                values, vectors = torch.linalg.eigh(state["gram"] / (1 - self.memory**seen))
                values = values.clamp(min=EIGENVALUE_FLOOR * float(values[-1]))
                state["root"].copy_(vectors / values.sqrt() @ vectors.mT)
            found.append(n @ state["root"] * self.scale)
        return found


def create_basis(matrix: Tensor) -> dict[str, Tensor]:
    """The state of a basis for the rows of a matrix."""
    size = matrix.shape[1]
    gram = torch.zeros(size, size, device=matrix.device)
    return {"gram": gram, "basis": torch.eye(size, device=matrix.device)}


def turn_basis(state: dict[str, Tensor], m: Tensor, seen: int) -> None:
    """Add a matrix to the moving mean, and from time to time follow its eigenvectors.

    They are decomposed once. After that one step of orthogonal iteration keeps up with them.
    """
    gram, basis = state["gram"], state["basis"]
    gram.lerp_(m.mT @ m, 1 - GRAM_DECAY)
    if seen == 1:
        basis.copy_(torch.linalg.eigh(gram).eigenvectors.flip(1))  # the largest comes first
    elif is_due(seen):
        basis.copy_(torch.linalg.qr(gram @ basis).Q)
