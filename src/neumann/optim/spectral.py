"""The spectral preconditioner: the orthogonal matrix nearest to the gradient's matrix.

For G = UΣVᵀ it is UVᵀ: every direction of a layer's gradient counts alike, whatever its singular
value. It is what Shampoo's (GGᵀ)^{-1/4} G (GᵀG)^{-1/4} gives without memory. UVᵀ comes from a
Newton–Schulz iteration, which is matrix products alone,

    X ← aX + (bA + cA²)X        A = XXᵀ, X₀ = G/‖G‖

with the coefficients of Jordan and others (2024), which take singular values from far below 1 to
between 0.7 and 1.2 in five iterations. Matrices of equal shape are taken together; on CUDA in
bfloat16, elsewhere in float32.

An orthogonal m × n matrix has elements of root mean square 1/√max(m, n). Scaled by √max(m, n), the
direction of every tensor has the same root mean square, and what is no matrix (biases,
normalisation) has it too in the diagonal form: so one learning rate serves all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from neumann.optim.preconditioners import Diagonal, Momentum, Preconditioner, States

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


@dataclass(frozen=True)
class Spectral:
    """UVᵀ for matrices, convolutions as out × (in·kh·kw); `vectors` for everything else."""

    scale: float = 0.2  # root mean square of a direction
    vectors: Diagonal = field(default_factory=lambda: Diagonal(scale=0.2))
    before: Preconditioner | None = field(default_factory=Momentum)

    name = "spectral"

    def elementwise(self, parameter: Tensor) -> bool:
        """Of what is no matrix."""
        return not is_matrix(parameter)

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        """Nothing for a matrix: its direction depends on what it is given alone."""
        return {} if is_matrix(parameter) else self.vectors.create(parameter)

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        """Shape by shape."""
        directions: list[Tensor | None] = [None] * len(gradients)
        shapes: dict[tuple[int, int], list[int]] = {}
        rest = []
        for index, gradient in enumerate(gradients):
            if "second_moment" not in states[index]:  # which `vectors` keeps
                rows = gradient.shape[0]
                shapes.setdefault((rows, gradient.numel() // rows), []).append(index)
            else:
                rest.append(index)
        for (rows, columns), chosen in shapes.items():
            stack = torch.stack([_rows_first(gradients[i]).flatten(1) for i in chosen])
            scale = self.scale * max(rows, columns) ** 0.5
            for i, matrix in zip(chosen, orthogonalised(stack, scale).unbind(), strict=True):
                directions[i] = _laid_out(matrix, gradients[i])
        if rest:
            found = self.vectors.apply([gradients[i] for i in rest], [states[i] for i in rest])
            for i, direction in zip(rest, found, strict=True):
                directions[i] = direction
        return [direction for direction in directions if direction is not None]


def _rows_first(gradient: Tensor) -> Tensor:
    """The gradient with its other dimensions in the order of memory, so that rows are read as they
    lie: another order of a matrix's columns only orders those of UVᵀ alike.
    """
    if gradient.ndim == 4 and gradient.is_contiguous(memory_format=torch.channels_last):
        return gradient.permute(0, 2, 3, 1)
    return gradient


def _laid_out(matrix: Tensor, like: Tensor) -> Tensor:
    """The matrix as a tensor with the shape and the memory format of another."""
    shape = _rows_first(like).shape
    if shape == like.shape:
        return matrix.reshape(like.shape)
    return matrix.reshape(shape).permute(0, 3, 1, 2)


def is_matrix(tensor: Tensor) -> bool:
    """Whether the tensor is seen as a matrix: more than one row and more than one column."""
    if tensor.ndim < 2 or tensor.is_complex() or tensor.numel() == 0:
        return False
    rows = tensor.shape[0]
    return rows > 1 and tensor.numel() > rows


def orthogonalised(matrices: Tensor, scale: float = 1.0) -> Tensor:
    """UVᵀ·scale of each of a batch (b, m, n), in its dtype; zero stays zero."""
    norms = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    x = matrices / norms.clamp(min=torch.finfo(matrices.dtype).tiny)
    x = x.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    wide = x.shape[1] <= x.shape[2]
    if not wide:
        x = x.mT
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    result: Tensor = (x if wide else x.mT).to(matrices.dtype) * scale
    return result
