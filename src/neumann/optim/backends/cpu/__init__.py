"""The update on CPUs as one pass over memory, through numba (extra `cpu`).

`numba_pass` prepares tensors, `address_table` lists their addresses and runs the threads, and
`numba_kernel` is the compiled arithmetic; `compile_lock` keeps processes from compiling it at once.
Importing this needs torch alone.
"""

from collections.abc import Callable
from typing import ClassVar

import torch

from neumann.optim.backends.cpu import numba_pass
from neumann.optim.backends.host import HostBackend
from neumann.optim.phases import Coefficients
from neumann.optim.tensors import Tensors


class NumbaBackend(HostBackend):
    """One pass over memory for each group, on as many threads as torch uses."""

    name = "numba"
    device_type: ClassVar[str | None] = "cpu"
    unscales: ClassVar[bool] = True
    sums_squares: ClassVar[bool] = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._passes: dict[int, numba_pass.Pass] = {}

    @classmethod
    def unavailable(cls, sums: int) -> str | None:
        """Why numba cannot be used here; None if it can."""
        return numba_pass.unavailable()

    def prepare_update(
        self, index: int, tensors: Tensors, coefficients: Coefficients, seed: int
    ) -> Callable[[], float]:
        own = self._passes.setdefault(index, numba_pass.Pass())
        return own.prepare(tensors, coefficients, rounding="stochastic", seed=seed)
