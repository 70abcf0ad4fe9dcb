"""The orthonormal vectors of a Lanczos run, and the operations that involve all of them.

A new vector w is orthogonalized against the rows of Q by two sweeps of classical Gram–Schmidt:
h = Qw, w ← w − Qᵀh. One sweep is not enough: two leave w orthogonal up to rounding even when they
remove most of it. The rows are stored in blocks, so that growing copies nothing; in host memory if
the device cannot hold them all, and then the sweeps run there.
"""

import torch
from torch import Tensor

from neumann.spectrum.operators.vectors import scalar_dtype

ROWS_PER_BLOCK = 16
SLICES = 256  # per row, in a product on a GPU


class Basis:
    """Orthonormal rows of n numbers."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, host: bool) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        self.storage_device = torch.device("cpu") if host else device
        self.blocks: list[Tensor] = []  # (ROWS_PER_BLOCK, n) each
        self.count = 0

    def append(self, vector: Tensor) -> None:
        """Add a row, which must have length 1 and be orthogonal to all others."""
        block, row = divmod(self.count, ROWS_PER_BLOCK)
        if block == len(self.blocks):
            shape = (ROWS_PER_BLOCK, self.size)
            self.blocks.append(torch.empty(shape, dtype=self.dtype, device=self.storage_device))
        self.blocks[block][row].copy_(vector)
        self.count += 1

    def truncate(self, count: int) -> None:
        """Drop all rows but the first `count`."""
        self.count = count
        del self.blocks[-(-count // ROWS_PER_BLOCK) :]

    def orthogonalize(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return a copy of the vector without its components along all rows, and these (count,)."""
        rest = vector.to(self.storage_device, copy=True)
        sweeps = []
        for _ in range(2):
            found = [_project(rows, rest) for rows in self._filled_blocks()]
            for rows, part in zip(self._filled_blocks(), found, strict=True):
                rest.addmv_(rows.t(), part.to(self.dtype), alpha=-1)
            sweeps.append(torch.cat(found))
        total = sweeps[0] + sweeps[1]
        return rest.to(self.device), total.to(self.device, scalar_dtype(self.device))

    def combine(self, weights: Tensor) -> Tensor:
        """Return weighted sums of the rows (m, n) on the device, for weights (m, count)."""
        sums = torch.zeros(len(weights), self.size, dtype=self.dtype, device=self.device)
        start = 0
        for rows in self._filled_blocks():
            part = weights[:, start : start + len(rows)].to(self.storage_device, self.dtype)
            sums.add_((part @ rows).to(self.device))
            start += len(rows)
        return sums

    def _filled_blocks(self) -> list[Tensor]:
        return [
            block[: self.count - index * ROWS_PER_BLOCK] for index, block in enumerate(self.blocks)
        ]


def _project(rows: Tensor, vector: Tensor) -> Tensor:
    """Return rows @ vector in the dtype of scalars."""
    if rows.device.type != "cuda" or rows.shape[1] < 64 * SLICES:
        return torch.mv(rows, vector).to(scalar_dtype(rows.device))
    return sliced_product(rows, vector)


def sliced_product(rows: Tensor, vector: Tensor) -> Tensor:
    """Return rows @ vector for a few long rows, as a sum over slices of them, in float64.

    A plain matrix-vector product gives each row to one block of a GPU and leaves most of it idle.
    """
    width = rows.shape[1] // SLICES
    even = width * SLICES
    slices = rows[:, :even].view(len(rows), SLICES, width).transpose(0, 1)
    parts = torch.bmm(slices, vector[:even].view(SLICES, width, 1))
    total = parts.sum(0, dtype=torch.float64).squeeze(1)
    if even < rows.shape[1]:
        total += torch.mv(rows[:, even:], vector[even:])
    return total
