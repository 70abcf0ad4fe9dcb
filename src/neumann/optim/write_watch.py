"""A warning when something other than the optimizer writes to its parameters."""

from collections.abc import Callable
from operator import is_

from torch import Tensor

from neumann.caller_warnings import warn_caller


class WriteWatch:
    """Warns, once, if something else wrote a parameter between two steps.

    Loading or clamping weights moves w and leaves δ = w − v alone, so the average moves along. That
    may be intended, but should not go unnoticed. A tensor counts its in-place writes in `_version`;
    the kernels, which write past torch, count theirs there too.
    """

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._versions: list[int] = []
        self._warned = False

    def compare(self, parameters: list[Tensor], name_of: Callable[[Tensor], str]) -> None:
        """Warn if a parameter differs from what the last step left."""
        if self._warned or not self._parameters:
            return
        versions = [p._version for p in parameters]
        if versions == self._versions and all(map(is_, parameters, self._parameters)):
            return
        left = dict(zip(map(id, self._parameters), self._versions, strict=True))
        for p, version in zip(parameters, versions, strict=True):
            if left.get(id(p), version) != version:
                self._warned = True
                warn_caller(
                    f"{name_of(p)} was changed between two steps by something other than this "
                    "optimizer. Its offset from the average is kept, so the average has moved "
                    "along; call optimizer.reset_average() if it should start at the new weights.",
                )
                return

    def remember(self, parameters: list[Tensor] | None = None) -> None:
        """Remember the parameters as they are now; by default the same ones as before."""
        if parameters is not None:
            self._parameters = parameters
        self._versions = [p._version for p in self._parameters]
