"""The orthonormal vectors of a Lanczos run, and what is done with all of them at once.

A new vector w loses its components along all of them in two sweeps of classical Gram–Schmidt,

    h = Qw,  w ← w − Qᵀh        twice; the coefficients are the sums of both h

each two matrix-vector products over rows that are kept in blocks, so that the memory grows with the
steps that are done and nothing is copied when it does. Two sweeps leave w orthogonal to rounding,
even where most of it was removed; one does not. The rows may be kept on the host, for more of them
than the device holds; the sweeps run there then.
"""

import torch
from torch import Tensor

ROWS = 16  # in a block
SLICES = 256  # of a row, in a product on a GPU


class Basis:
    """Orthonormal rows of n numbers."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, host: bool) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        self.place = torch.device("cpu") if host else device
        self.blocks: list[Tensor] = []  # (ROWS, n) each
        self.count = 0

    def append(self, vector: Tensor) -> None:
        """A further row, which must be orthogonal to all others and of length 1."""
        index = self.count % ROWS
        if index == 0 and self.count // ROWS == len(self.blocks):
            block = torch.empty(ROWS, self.size, dtype=self.dtype, device=self.place)
            self.blocks.append(block)
        self.blocks[self.count // ROWS][index].copy_(vector)
        self.count += 1

    def truncate(self, count: int) -> None:
        """Forget all rows but the first `count`."""
        self.count = count
        del self.blocks[-(-count // ROWS) :]

    def last(self) -> Tensor:
        row = self.blocks[(self.count - 1) // ROWS][(self.count - 1) % ROWS]
        return row.to(self.device)

    def without(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """The vector less its components along all rows, and those (count,) as scalars.

        The vector given is not changed.
        """
        rest = vector.to(self.place)
        total: Tensor | None = None
        for sweep in range(2):
            found = [_project(rows, rest) for rows in self._filled()]
            for index, (rows, part) in enumerate(zip(self._filled(), found, strict=True)):
                if sweep == 0 and index == 0:
                    rest = torch.addmv(rest, rows.t(), part.to(self.dtype), alpha=-1)
                else:
                    rest.addmv_(rows.t(), part.to(self.dtype), alpha=-1)
            coefficients = torch.cat(found)
            total = coefficients if total is None else total + coefficients
        assert total is not None
        return rest.to(self.device), total.to(self.device, scalar_dtype(self.device))

    def combine(self, weights: Tensor) -> Tensor:
        """Sums of rows (m, n) on the device, for weights (m, count)."""
        sums = torch.zeros(len(weights), self.size, dtype=self.dtype, device=self.device)
        start = 0
        for rows in self._filled():
            part = weights[:, start : start + len(rows)].to(self.place, self.dtype)
            sums.add_((part @ rows).to(self.device))
            start += len(rows)
        return sums

    def _filled(self) -> list[Tensor]:
        counts = [min(ROWS, self.count - i * ROWS) for i in range(len(self.blocks))]
        return [block[:n] for block, n in zip(self.blocks, counts, strict=True)]


def scalar_dtype(device: torch.device) -> torch.dtype:
    """The dtype for the few scalars of a step: float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def _project(rows: Tensor, vector: Tensor) -> Tensor:
    """rows @ vector, as scalars of a step."""
    if rows.device.type != "cuda" or rows.shape[1] < 64 * SLICES:
        return torch.mv(rows, vector).to(scalar_dtype(rows.device))
    return sliced_product(rows, vector)


def sliced_product(rows: Tensor, vector: Tensor) -> Tensor:
    """rows @ vector for few long rows: a sum over slices of them.

    A plain matrix-vector product gives each row to one block of a GPU and leaves most of it idle.
    The slices are added in float64, which makes the sum more accurate too.
    """
    width = rows.shape[1] // SLICES
    even = width * SLICES
    slices = rows[:, :even].view(len(rows), SLICES, width).transpose(0, 1)
    parts = torch.bmm(slices, vector[:even].view(SLICES, width, 1))
    total = parts.sum(0, dtype=torch.float64).squeeze(1)
    if even < rows.shape[1]:
        total += torch.mv(rows[:, even:], vector[even:])
    return total
