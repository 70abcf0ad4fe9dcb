"""The spectrum of a loss's curvature: extreme eigenvalues, densities, and how accurate they are.

Needs only torch::

    from neumann.spectrum import Hessian, extremes

    found = extremes(Hessian(model, torch.nn.functional.cross_entropy, batch=(x, y)))
    print(found.largest.value, found.largest.error)

`operators` holds the matrices, `algorithms` what computes their spectra, and `convexification` the
paper's μ and η for a spectrum.
"""

from neumann.spectrum.algorithms.density import Density, Estimate, density
from neumann.spectrum.algorithms.lanczos import Extreme, Extremes, Lanczos, extremes, lanczos
from neumann.spectrum.convexification import Convexification, coefficients
from neumann.spectrum.operators.finite_differences import Differences
from neumann.spectrum.operators.gauss_newton import GaussNewton
from neumann.spectrum.operators.hessian import Hessian
from neumann.spectrum.operators.loss_curvature import CurvatureOperator
from neumann.spectrum.operators.objective import Objective
from neumann.spectrum.operators.preconditioned import Preconditioned
from neumann.spectrum.operators.symmetric import (
    About,
    FunctionOperator,
    MatrixOperator,
    NonFiniteProduct,
    Operator,
)

__all__ = [
    "About",
    "Convexification",
    "CurvatureOperator",
    "Density",
    "Differences",
    "Estimate",
    "Extreme",
    "Extremes",
    "FunctionOperator",
    "GaussNewton",
    "Hessian",
    "Lanczos",
    "MatrixOperator",
    "NonFiniteProduct",
    "Objective",
    "Operator",
    "Preconditioned",
    "coefficients",
    "density",
    "extremes",
    "lanczos",
]
