"""The old import path of :mod:`neumann.theory.series`; nothing in the package uses it."""

from neumann.theory.series import *  # noqa: F403
