"""The optimizer and the mathematics it is made of; needs torch alone."""

from neumann.optim.batchnorm import recalibrate_batchnorm
from neumann.optim.guard import guard
from neumann.optim.idealized import IdealizedNeumann
from neumann.optim.neumann import Neumann

__all__ = ["IdealizedNeumann", "Neumann", "guard", "recalibrate_batchnorm"]
