"""The old import path of `neumann.optim.preconditioners.Spectral`; nothing here uses it."""

from neumann.optim.preconditioners import Spectral

__all__ = ["Spectral"]
