"""A symmetric matrix known by its products with vectors: what every algorithm here works on.

`operator @ v` checks the flat vector v and the result; `product` skips the checks. Inside
`with operator.session():` products share work, such as an autograd graph; outside of a session
every product opens its own.

How it fails: if an operator is not symmetric, or answers the same vector differently each time, the
Ritz values belong to no matrix. `lanczos` measures the asymmetry and adds it to its error bounds.
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
    """What was measured. Every result carries it."""

    matrix: str  # "hessian", "gauss-newton", …, or "preconditioned hessian"
    parameters: int  # n, the rows of the matrix
    dtype: torch.dtype  # of the products
    device: torch.device
    examples: int | None = None  # the loss is their mean, over all ranks
    batches: int | None = None  # on this rank; each has its own BatchNorm statistics
    batchnorm: str | None = None  # "batch" or "running"; None if the model has no BatchNorm
    randomness: str | None = None  # e.g. "dropout fixed by seed 0"; None if nothing is random
    weight_decay: float = 0.0  # the matrix includes this multiple of the identity
    names: tuple[str, ...] = ()  # of the parameters, in the order of the flat vector
    ranks: int = 1  # processes whose examples are included


class NonFiniteProduct(ArithmeticError):
    """A product contained NaN or infinity."""


class Operator(ABC):
    """A symmetric matrix that can be multiplied by vectors."""

    has_second_product = False  # whether `second_product` is defined

    def __init__(self, about: About) -> None:
        if about.parameters < 1:
            raise ValueError(f"an operator needs at least 1 row, got {about.parameters}")
        if about.dtype not in DTYPES:
            raise ValueError(
                f"products must be float32 or float64, got {about.dtype}; measure a float32 copy "
                "of the model, such as copy.deepcopy(model).float()"
            )
        self.about = about
        self.size, self.dtype, self.device = about.parameters, about.dtype, about.device

    @abstractmethod
    def product(self, vector: Tensor) -> Tensor:
        """Return Hv, without checks; v must not change."""

    @contextmanager
    def session(self) -> Iterator[None]:
        """Let the products inside share work, and clean up at the end."""
        yield

    def product_error(self) -> float:
        """Estimate the error ‖computed Hv − Hv‖ for a unit vector, beyond rounding."""
        return 0.0

    def second_product(self, vector: Tensor) -> Tensor:
        """Return Hv with an error at most half as large, or of a different kind."""
        raise NotImplementedError

    def agree(self, numbers: Tensor) -> Tensor:
        """Make the numbers behind a decision the same on every rank of a process group."""
        return numbers

    def matvec(self, vector: Tensor) -> Tensor:
        """Return Hv, with v and the result checked."""
        self.check_vector(vector)
        with self.session():
            return self._check_finite(self.product(vector))

    def matmat(self, matrix: Tensor) -> Tensor:
        """Return HV for a matrix (n, k), one column after the other in one session."""
        self._check(matrix, (self.size, matrix.shape[-1] if matrix.ndim else 0))
        with self.session():
            columns = [self.product(column.contiguous()) for column in matrix.unbind(1)]
            product = torch.stack(columns, 1) if columns else torch.empty_like(matrix)
            return self._check_finite(product)

    def __matmul__(self, other: Tensor) -> Tensor:
        return self.matvec(other) if other.ndim == 1 else self.matmat(other)

    def dense(self) -> Tensor:
        """Return the whole matrix (n, n), symmetrized. Takes n products, so only for small n."""
        full = self.matmat(torch.eye(self.size, dtype=self.dtype, device=self.device))
        return (full + full.T) / 2

    def check_vector(self, vector: Tensor) -> None:
        """Raise ValueError if the vector has the wrong shape, dtype or device."""
        self._check(vector, (self.size,))

    def _check(self, given: Tensor, shape: tuple[int, ...]) -> None:
        if given.shape != shape or given.dtype != self.dtype or given.device != self.device:
            raise ValueError(
                f"a vector for this operator has shape ({self.size},) or ({self.size}, k), "
                f"{self.dtype} on {self.device}; got {tuple(given.shape)}, {given.dtype} on "
                f"{given.device}"
            )

    def nonfinite_error(self, product: str = "a product") -> NonFiniteProduct:
        return NonFiniteProduct(
            f"{product} with the {self.about.matrix} contains NaN or infinity: the loss is not "
            "finite at these weights, or its second derivatives overflow"
        )

    def _check_finite(self, product: Tensor) -> Tensor:
        if not torch.isfinite(product).all():
            raise self.nonfinite_error()
        return product


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
        self.check_vector(answer)
        return answer
