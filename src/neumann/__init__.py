"""Neumann: the Neumann optimizer for PyTorch.

The packages: `optim` (the optimizer), `theory`, `spectrum`, `integrations` and `lab`. All of them
check their arguments with `validation`; `extras` says how to install what is missing,
`caller_warnings` makes warnings name the user's line, and `capture_stream` is where CUDA graphs are
captured. The names below are imported on first use, so that commands that only print something do
not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_PACKAGES = ("integrations", "lab", "optim", "spectrum", "theory")
_HOMES = {"IdealizedNeumann": "neumann.theory.idealized"}  # of the others: neumann.optim


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"neumann.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'neumann' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "neumann.optim")), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
