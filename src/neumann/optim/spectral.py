"""The spectral preconditioner: the orthogonal matrix nearest to the gradient's matrix.

For G = UΣVᵀ it is UVᵀ: every direction of a layer's gradient counts alike, whatever its singular
value. It is what Shampoo's (GGᵀ)^{-1/4} G (GᵀG)^{-1/4} gives without memory. UVᵀ comes from a
Newton–Schulz iteration, which is matrix products alone,

    X ← aX + (bA + cA²)X        A = XXᵀ, X₀ = G/‖G‖

with the coefficients of Jordan and others (2024), which take singular values from far below 1 to
between 0.7 and 1.2 in five iterations, on CUDA in bfloat16, elsewhere in float32. A matrix with
more rows than columns is taken as its transpose; matrices of equal shape are taken together, and on
CUDA smaller ones with them, filled up with zeros.

An orthogonal m × n matrix has elements of root mean square 1/√max(m, n). Scaled by √max(m, n), the
direction of every tensor has the same root mean square, and what is no matrix (biases,
normalisation) has it too in the diagonal form: so one learning rate serves all.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from neumann.optim.preconditioners import (
    Diagonal,
    Momentum,
    Preconditioner,
    States,
    check_positive,
    is_preconditioner,
)

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
OPERATIONS = 4 * ITERATIONS  # for m × n, times m²n
VECTOR = "vector_"  # begins the names of what `vectors` remembers


@dataclass(frozen=True)
class Spectral:
    """UVᵀ for matrices, convolutions as out × (in·kh·kw); `vectors` for everything else."""

    scale: float = 0.2  # root mean square of a direction
    vectors: Preconditioner = field(default_factory=Diagonal)
    before: Preconditioner | None = field(default_factory=Momentum)

    name = "spectral"

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)
        for option, given in (("vectors", self.vectors), ("before", self.before)):
            if not is_preconditioner(given) and (given is not None or option == "vectors"):
                raise ValueError(f"{option} must be a Preconditioner, got {given!r}")

    def elementwise(self, parameter: Tensor) -> bool:
        """Of what is no matrix."""
        return not is_matrix(parameter)

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        """Nothing for a matrix: its direction depends on what it is given alone."""
        if not self.elementwise(parameter):
            return {}
        return {VECTOR + key: value for key, value in self.vectors.create(parameter).items()}

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        """Many matrices at a time."""
        matrices: dict[int, Tensor] = {}
        rest: dict[int, dict[str, Tensor]] = {}
        for index, (gradient, state) in enumerate(zip(gradients, states, strict=True)):
            own = vector_state(state)
            if own or not is_matrix(gradient):  # which a complex vector, as pairs of reals, is
                rest[index] = own
            else:
                matrices[index] = _lying(_rows_first(gradient).flatten(1))
        found: dict[int, Tensor] = {}
        for batch in _batches(matrices):
            results = orthogonalised(_stacked([matrices[i] for i in batch]))
            for i, result in zip(batch, results.unbind(), strict=True):
                rows, columns = matrices[i].shape
                found[i] = _laid_out(result[:rows, :columns], gradients[i])
        if found:
            scales = [self.scale * matrices[i].shape[1] ** 0.5 for i in found]
            torch._foreach_mul_(list(found.values()), scales)
        if rest:
            others = self.vectors.apply([gradients[i] for i in rest], list(rest.values()))
            found.update(zip(rest, others, strict=True))
        return [found[i] for i in range(len(gradients))]


# The preconditioners that can be asked for by name.
NAMED: Mapping[str, Preconditioner] = {own.name: own for own in (Diagonal(), Spectral())}


def vector_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `vectors` remembers of a parameter; nothing for a matrix."""
    return {key[len(VECTOR) :]: value for key, value in state.items() if key.startswith(VECTOR)}


def _batches(matrices: Mapping[int, Tensor]) -> list[list[int]]:
    """Which lying matrices to take together: those of equal shape; on a GPU also smaller ones,
    filled up with rows and columns of zeros, where that costs less than a batch of their own. There
    are never more zeros than numbers.
    """
    kinds: dict[tuple[int, int], list[int]] = {}
    for index, matrix in matrices.items():
        kinds.setdefault((matrix.shape[0], matrix.shape[1]), []).append(index)
    allowed = sum(rows * columns * len(chosen) for (rows, columns), chosen in kinds.items())
    found: list[list[int]] = []
    height = width = 0  # of the last batch
    for (rows, columns), chosen in sorted(kinds.items(), reverse=True):
        if found:
            there, new, wider = len(found[-1]), len(chosen), max(width, columns)
            zeros = height * (wider * (there + new) - width * there) - rows * columns * new
            work = height**2 * (wider * (there + new) - width * there) - rows**2 * columns * new
            if zeros <= allowed and OPERATIONS * work < _launching(matrices[chosen[0]]):
                found[-1] += chosen
                width, allowed = wider, allowed - zeros
                continue
        found.append(list(chosen))
        height, width = rows, columns
    return found


def _launching(matrix: Tensor) -> float:
    """Operations that the device could do while another batch's kernels are launched."""
    return 2e10 if matrix.is_cuda else 0.0


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    """As one batch. Rows and columns of zeros stay zeros and change nothing in the others."""
    shapes = [matrix.shape for matrix in matrices]
    rows, columns = max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)
    if all(shape == (rows, columns) for shape in shapes):
        return torch.stack(list(matrices))
    stack = matrices[0].new_zeros(len(matrices), rows, columns)
    for place, matrix, shape in zip(stack.unbind(), matrices, shapes, strict=True):
        place[: shape[0], : shape[1]].copy_(matrix)
    return stack


def _lying(matrix: Tensor) -> Tensor:
    """With no more rows than columns."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT


def _rows_first(gradient: Tensor) -> Tensor:
    """The gradient with its other dimensions in the order of memory, so that rows are read as they
    lie: another order of a matrix's columns only orders those of UVᵀ alike.
    """
    return gradient.permute(0, 2, 3, 1) if _is_channels_last(gradient) else gradient


def _laid_out(lying: Tensor, like: Tensor) -> Tensor:
    """A lying matrix with the shape and the memory format of another tensor: itself, or a copy."""
    matrix = lying if len(lying) == len(like) else lying.mT
    result = matrix.reshape(_rows_first(like).shape)
    if _is_channels_last(like):
        result = result.permute(0, 3, 1, 2)
    return result if result.stride() == like.stride() else torch.empty_like(like).copy_(result)


def _is_channels_last(gradient: Tensor) -> bool:
    """Also by its strides, which for a kernel of 1 × 1 may be those of either format."""
    if gradient.ndim != 4 or gradient.stride(-1) == 1:
        return False
    return gradient.is_contiguous(memory_format=torch.channels_last)


def is_matrix(tensor: Tensor) -> bool:
    """Whether the tensor is seen as a matrix: more than one row and more than one column."""
    if tensor.ndim < 2 or tensor.is_complex():
        return False
    rows = tensor.shape[0]
    return rows > 1 and tensor.numel() > rows


def orthogonalised(lying: Tensor) -> Tensor:
    """UVᵀ of each of a batch (b, m, n), m ≤ n, in its dtype; zero stays zero."""
    largest = torch.linalg.vector_norm(lying, math.inf, (1, 2), keepdim=True)
    x = lying / largest.clamp(min=torch.finfo(lying.dtype).tiny)  # or squares would not be numbers
    x /= torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1)
    x = x.to(torch.bfloat16 if lying.is_cuda else torch.float32)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # adds before it rounds
        x = torch.baddbmm(x, polynomial, x, beta=a)
    result: Tensor = x.to(lying.dtype)
    return result
