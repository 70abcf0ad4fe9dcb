"""The preconditioned Hessian PH, P a positive diagonal, by a symmetric matrix like it.

    P^{1/2}·H·P^{1/2} = P^{-1/2}·(PH)·P^{1/2}

PH is not symmetric, but similar to the left side, which is: their eigenvalues are the same, and an
eigenvector y of the left side is P^{1/2}y of PH. The series Σ(I − ηPH)ⁱ converges by these
eigenvalues. For P = diag(1/√v) with Adam's v they are the curvature that Adam sees.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from neumann.spectrum.curvature import CurvatureOperator
from neumann.spectrum.operators import Operator


class Preconditioned(Operator):
    """P^{1/2}·H·P^{1/2}, whose eigenvalues are those of PH.

    Args:
        operator: H.
        diagonal: of P, positive; a flat vector, or for a model a tensor for each parameter name.
    """

    def __init__(self, operator: Operator, diagonal: Tensor | Mapping[str, Tensor]) -> None:
        if not isinstance(diagonal, Tensor):
            if not isinstance(operator, CurvatureOperator):
                raise TypeError(
                    "diagonal by name needs an operator of a model; pass a flat vector of "
                    f"{operator.size} numbers"
                )
            diagonal = operator.layout.flatten(diagonal)
        if diagonal.shape != (operator.size,):
            raise ValueError(
                f"diagonal must have shape ({operator.size},), got {tuple(diagonal.shape)}"
            )
        if not (torch.isfinite(diagonal).all() and (diagonal > 0).all()):
            raise ValueError(
                "diagonal must be finite and above 0 everywhere, got values from "
                f"{float(diagonal.min())} to {float(diagonal.max())}"
            )
        about = operator.about
        super().__init__(replace(about, matrix=f"preconditioned {about.matrix}"))
        self.operator = operator
        self.root = diagonal.detach().double().sqrt().to(operator.device, operator.dtype)

    def product(self, vector: Tensor) -> Tensor:
        return self.operator.product(vector * self.root) * self.root

    @contextmanager
    def session(self) -> Iterator[None]:
        with self.operator.session():
            yield

    def product_error(self) -> float:
        return self.operator.product_error() * float(self.root.max()) ** 2

    def agree(self, numbers: Tensor) -> Tensor:
        return self.operator.agree(numbers)
