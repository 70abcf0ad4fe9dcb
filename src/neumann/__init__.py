"""Neumann: the Neumann optimizer for PyTorch."""

from neumann.optim import Neumann, guard, recalibrate_batchnorm
from neumann.theory.idealized import IdealizedNeumann

__version__ = "0.1.0"

__all__ = ["IdealizedNeumann", "Neumann", "__version__", "guard", "recalibrate_batchnorm"]
