"""The preconditioned Hessian PH for a positive diagonal P, as a symmetric matrix.

P^{1/2}·H·P^{1/2} is symmetric and similar to PH, so both have the same eigenvalues, and an
eigenvector y of it gives the eigenvector P^{1/2}y of PH. The series Σ(I − ηPH)ⁱ converges according
to these eigenvalues. For P = diag(1/√v) with Adam's v, they are the curvature that Adam sees.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from neumann.spectrum.operators.loss_curvature import CurvatureOperator
from neumann.spectrum.operators.symmetric import Operator
from neumann.validation import require


class Preconditioned(Operator):
    """P^{1/2}·H·P^{1/2}, which has the eigenvalues of PH.

    Args:
        operator: H.
        diagonal: of P, positive: a flat vector or, for a model, a tensor for each parameter name.
    """

    def __init__(self, operator: Operator, diagonal: Tensor | Mapping[str, Tensor]) -> None:
        if not isinstance(diagonal, Tensor):
            if not isinstance(operator, CurvatureOperator):
                raise TypeError(f"without a model, pass a flat vector of {operator.size} numbers")
            diagonal = operator.layout.flatten(diagonal)
        shape = tuple(diagonal.shape)
        require(shape == (operator.size,), "diagonal", shape, f"of shape ({operator.size},)")
        good = bool((torch.isfinite(diagonal) & (diagonal > 0)).all())
        ends = f"values from {float(diagonal.min())} to {float(diagonal.max())}"
        require(good, "diagonal", ends, "finite and above 0 everywhere")
        about = operator.about
        super().__init__(replace(about, matrix=f"preconditioned {about.matrix}"))
        self.operator = operator
        self.has_second_product = operator.has_second_product
        self.root = diagonal.detach().double().sqrt().to(operator.device, operator.dtype)

    def product(self, vector: Tensor) -> Tensor:
        return self.operator.product(vector * self.root) * self.root

    def second_product(self, vector: Tensor) -> Tensor:
        return self.operator.second_product(vector * self.root) * self.root

    @contextmanager
    def session(self) -> Iterator[None]:
        with self.operator.session():
            yield

    def product_error(self) -> float:
        return self.operator.product_error() * float(self.root.max()) ** 2

    def agree(self, numbers: Tensor) -> Tensor:
        return self.operator.agree(numbers)
