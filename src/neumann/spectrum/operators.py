"""A symmetric matrix known by its products with vectors: what every algorithm here works on.

An operator has a size n, a dtype and a device, and turns a flat vector v of n numbers into Hv.
`operator @ v` checks v and the answer; `product` is the same without the checks, for loops that
check now and then. Between `with operator.session():` and its end an operator may keep what its
products share, an autograd graph for instance, and nothing remains of it afterwards; outside of a
session every product opens one of its own.

How it fails: Lanczos and everything built on it assume that H is one symmetric matrix. An operator
that answers the same vector differently each time, or is not symmetric, gives Ritz values of no
matrix at all; the asymmetry that `lanczos` measures along the way becomes part of its error bounds.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class About:
    """What an operator is the matrix of: every result carries it."""

    matrix: str  # "hessian", "gauss-newton", …; "preconditioned " before it where it is
    parameters: int  # n, rows of the matrix
    dtype: torch.dtype  # of the products
    device: torch.device
    examples: int | None = None  # the loss is the mean over them, of all ranks
    batches: int | None = None  # on this rank; each has its own BatchNorm statistics
    batchnorm: str | None = None  # "batch" or "running"; None where no layer depends on it
    randomness: str | None = None  # e.g. "dropout fixed by seed 0"; None where nothing is random
    weight_decay: float = 0.0  # λ of the λI that is included; 0: not included
    names: tuple[str, ...] = ()  # of the parameters, in the order of the flat vector
    ranks: int = 1  # processes whose examples are in it


class NonFiniteProduct(ArithmeticError):
    """A product held NaN or infinity."""


class Operator(ABC):
    """A symmetric matrix that can be multiplied with vectors."""

    def __init__(self, about: About) -> None:
        if about.parameters < 1:
            raise ValueError(f"an operator needs at least 1 row, got {about.parameters}")
        if about.dtype not in DTYPES:
            raise ValueError(
                f"products must be float32 or float64, got {about.dtype}; take a copy of the model "
                "in float32, such as copy.deepcopy(model).float()"
            )
        self.about = about

    @property
    def size(self) -> int:
        return self.about.parameters

    @property
    def dtype(self) -> torch.dtype:
        return self.about.dtype

    @property
    def device(self) -> torch.device:
        return self.about.device

    @abstractmethod
    def product(self, vector: Tensor) -> Tensor:
        """Hv for a flat vector that is known to fit; v is not changed."""

    @contextmanager
    def session(self) -> Iterator[None]:
        """Products inside may share work; everything is as before at the end."""
        yield

    def product_error(self) -> float:
        """About how far ‖computed Hv − Hv‖ may be off for a unit v, beyond rounding."""
        return 0.0

    def agree(self, numbers: Tensor) -> Tensor:
        """Numbers on which a decision hangs, the same on every rank of a process group."""
        return numbers

    def matvec(self, vector: Tensor) -> Tensor:
        """Hv, with v and Hv checked."""
        self._check(vector, (self.size,))
        with self.session():
            return self._finite(self.product(vector))

    def matmat(self, matrix: Tensor) -> Tensor:
        """HV for the columns of a matrix (n, k), one after the other in one session."""
        self._check(matrix, (self.size, matrix.shape[-1] if matrix.ndim else 0))
        with self.session():
            columns = [self.product(column.contiguous()) for column in matrix.unbind(1)]
            return self._finite(torch.stack(columns, 1) if columns else torch.empty_like(matrix))

    def __matmul__(self, other: Tensor) -> Tensor:
        return self.matvec(other) if other.ndim == 1 else self.matmat(other)

    def dense(self) -> Tensor:
        """The matrix (n, n), made symmetric: n products. For small n only."""
        full = self.matmat(torch.eye(self.size, dtype=self.dtype, device=self.device))
        return (full + full.T) / 2

    def _check(self, given: Tensor, shape: tuple[int, ...]) -> None:
        if given.shape != shape or given.dtype != self.dtype or given.device != self.device:
            wanted = f"({self.size},) or ({self.size}, k), {self.dtype} on {self.device}"
            raise ValueError(
                f"a vector for this operator has shape {wanted}; got {tuple(given.shape)}, "
                f"{given.dtype} on {given.device}"
            )

    def _finite(self, answer: Tensor) -> Tensor:
        if not torch.isfinite(answer).all():
            raise NonFiniteProduct(
                f"a product with the {self.about.matrix} holds NaN or infinity: the loss is not "
                "finite at these weights, or its second derivatives overflow"
            )
        return answer


class MatrixOperator(Operator):
    """A symmetric matrix given as a tensor (n, n)."""

    def __init__(self, matrix: Tensor) -> None:
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"matrix must be square, got shape {tuple(matrix.shape)}")
        super().__init__(About("matrix", len(matrix), matrix.dtype, matrix.device))
        self.matrix = matrix

    def product(self, vector: Tensor) -> Tensor:
        return self.matrix @ vector


class FunctionOperator(Operator):
    """A symmetric matrix given as a function of a flat vector."""

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(About("function", size, dtype, torch.device(device)))
        self.function = function

    def product(self, vector: Tensor) -> Tensor:
        answer = self.function(vector).detach()
        self._check(answer, (self.size,))
        return answer
