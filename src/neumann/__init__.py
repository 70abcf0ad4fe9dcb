"""Neumann: the Neumann optimizer for PyTorch.

The packages: `optim` (the optimizer), `theory`, `spectrum`, `integrations` and `lab`. All of them
check their arguments with `validation`.
"""

from neumann.optim import Neumann, guard, large_batch, param_groups, recalibrate_batchnorm
from neumann.theory.idealized import IdealizedNeumann

__version__ = "0.1.0"

__all__ = [
    "IdealizedNeumann",
    "Neumann",
    "__version__",
    "guard",
    "large_batch",
    "param_groups",
    "recalibrate_batchnorm",
]
