"""Noticing that somebody else wrote a parameter between two steps.

Loaded weights or clamping move w and leave δ = w − v alone, so the average moves along. That may be
what is wanted, but should not happen unseen. A tensor counts its in-place writes in `_version`; the
kernels, which write past torch, count theirs there too.
"""

import warnings
from collections.abc import Callable
from operator import is_

from torch import Tensor


class Watch:
    """The parameters as the last step left them. Warns once."""

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._versions: list[int] = []
        self._warned = False

    def look(self, parameters: list[Tensor], name: Callable[[Tensor], str]) -> None:
        """Warn if one of the parameters is not as it was left."""
        if self._warned or not self._parameters:
            return
        versions = [p._version for p in parameters]
        if versions == self._versions and all(map(is_, parameters, self._parameters)):
            return
        left = dict(zip(map(id, self._parameters), self._versions, strict=True))
        for p, version in zip(parameters, versions, strict=True):
            if left.get(id(p), version) != version:
                self._warned = True
                warnings.warn(
                    f"{name(p)} was changed between two steps by something else than this "
                    "optimizer. Its offset from the average is kept, so the average has moved "
                    "along; call optimizer.reset_average() where it should start at the new "
                    "weights.",
                    stacklevel=5,
                )
                return

    def leave(self, parameters: list[Tensor] | None = None) -> None:
        """Remember the parameters as they are now; by default those remembered before."""
        if parameters is not None:
            self._parameters = parameters
        self._versions = [p._version for p in self._parameters]
