"""The spectrum of a loss's curvature: extreme eigenvalues, densities, and how sure they are.

Needs torch alone::

    from neumann.spectrum import Hessian, extremes

    found = extremes(Hessian(model, torch.nn.functional.cross_entropy, batch=(x, y)))
    print(found.largest.value, found.largest.error)
"""

from neumann.spectrum.convexification import Convexification, coefficients
from neumann.spectrum.curvature import CurvatureOperator
from neumann.spectrum.density import Density, Estimate, density
from neumann.spectrum.differences import Differences
from neumann.spectrum.extremes import extremes
from neumann.spectrum.gauss_newton import GaussNewton
from neumann.spectrum.hessian import Hessian
from neumann.spectrum.lanczos import lanczos
from neumann.spectrum.objective import Objective
from neumann.spectrum.operators import (
    About,
    FunctionOperator,
    MatrixOperator,
    NonFiniteProduct,
    Operator,
)
from neumann.spectrum.preconditioned import Preconditioned
from neumann.spectrum.results import Extreme, Extremes, Lanczos

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
