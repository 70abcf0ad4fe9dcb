"""How a parameter holds matrices: one, or several that were fused into one tensor.

A linear layer holds one matrix of out × in. A fused projection holds several, one below the other;
experts are stacked along a first dimension; HF's Conv1D stores in × out. Orthogonalizing the fused
tensor would mix projections that have nothing to do with each other, so the spectral preconditioner
looks at each matrix by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neumann.validation import is_count, require


@dataclass(frozen=True)
class MatrixView:
    """Where the matrices of a tensor are. Dimensions after the first two of a matrix are inputs."""

    stacked: bool = False  # the first dimension counts matrices: experts, depthwise convolutions
    groups: int = 1  # of a grouped convolution, along the dimension that is stored first
    transposed: bool = False  # stored as in × out
    parts: int | tuple[int, ...] = 1  # fused projections: how many, or the outputs of each
    heads: int = 1  # the number of heads in each part

    def __post_init__(self) -> None:
        for name in ("groups", "heads"):
            value = getattr(self, name)
            require(is_count(value) and value >= 1, name, value, "a whole number of at least 1")
        sizes = self.parts if isinstance(self.parts, tuple) else (self.parts,)
        good = bool(sizes) and all(is_count(size) and size >= 1 for size in sizes)
        require(good, "parts", self.parts, "a number of parts, or the outputs of each part")

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Batches of matrices (count, out, in, …), one batch for each part.

        Raises:
            ValueError: the tensor has no such parts.
        """
        matrices = tensor if self.stacked else tensor.unsqueeze(0)
        if matrices.ndim < 3:
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} holds no matrix")
        if self.groups > 1:
            self._require_divisible(tensor, matrices.shape[1], self.groups, "groups")
            matrices = torch.unflatten(matrices, 1, (self.groups, -1)).flatten(0, 1)
        if self.transposed:
            matrices = matrices.transpose(1, 2)
        return [self._split_heads(part, tensor) for part in self._split_parts(matrices, tensor)]

    @property
    def part_count(self) -> int:
        """How many projections are fused in a tensor."""
        return self.parts if isinstance(self.parts, int) else len(self.parts)

    def count_sides(self, tensor: Tensor) -> tuple[int, int]:
        """The numbers of outputs and inputs of each matrix."""
        first = self.split(torch.empty(tensor.shape, device="meta"))[0]
        return int(first.shape[1]), int(first.shape[2:].numel())

    def join(self, batches: Sequence[Tensor], like: Tensor) -> Tensor:
        """The tensor whose batches of matrices these are, in the shape of another one."""
        count = self.groups * (len(like) if self.stacked else 1)
        parts = [torch.unflatten(batch, 0, (count, -1)).flatten(1, 2) for batch in batches]
        matrices = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        if self.transposed:
            matrices = matrices.transpose(1, 2)
        return matrices.reshape(like.shape)

    def _split_parts(self, matrices: Tensor, tensor: Tensor) -> list[Tensor]:
        outputs = matrices.shape[1]
        if isinstance(self.parts, int):
            self._require_divisible(tensor, outputs, self.parts, "parts")
            return [matrices] if self.parts == 1 else list(matrices.chunk(self.parts, 1))
        if sum(self.parts) != outputs:
            raise ValueError(
                f"parts of {self.parts} do not add up to the {outputs} outputs of a tensor of "
                f"shape {tuple(tensor.shape)}"
            )
        return list(torch.split(matrices, list(self.parts), 1))

    def _split_heads(self, part: Tensor, tensor: Tensor) -> Tensor:
        if self.heads == 1:
            return part
        self._require_divisible(tensor, part.shape[1], self.heads, "heads")
        return torch.unflatten(part, 1, (self.heads, -1)).flatten(0, 1)

    def _require_divisible(self, tensor: Tensor, size: int, count: int, what: str) -> None:
        if size % count:
            raise ValueError(
                f"{size} rows of a tensor of shape {tuple(tensor.shape)} do not divide into "
                f"{count} {what}"
            )

    def __str__(self) -> str:
        """The view in a few words, for a table; nothing for a plain matrix."""
        words = []
        if self.stacked:
            words.append("stacked")
        if self.groups > 1:
            words.append(f"{self.groups} groups")
        if self.transposed:
            words.append("in × out")
        if isinstance(self.parts, tuple):
            words.append(f"parts of {', '.join(map(str, self.parts))}")
        elif self.parts > 1:
            words.append(f"{self.parts} parts")
        if self.heads > 1:
            words.append(f"{self.heads} heads")
        return ", ".join(words)


WHOLE = MatrixView()
