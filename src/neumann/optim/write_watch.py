"""Warnings when something other than the optimizer writes to its parameters."""

import warnings
from collections.abc import Callable
from operator import is_

from torch import Tensor


class WriteWatch:
    """Warns, once in each case, if something else wrote a parameter.

    Between two steps: loading or clamping weights moves w and leaves δ = w − v alone, so the
    average moves along. Before `eval`: loaded weights are not those that m belongs to. In
    evaluation mode: `train` puts w back. All may be intended, but should not go unnoticed.

    A tensor counts its in-place writes in `_version`; the kernels, which write past torch, count
    theirs there too.
    """

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._versions: list[int] = []
        self._warned = False
        self._warned_of_switch = False

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
                warnings.warn(
                    f"{name_of(p)} was changed between two steps by something other than this "
                    "optimizer. Its offset from the average is kept, so the average has moved "
                    "along; call optimizer.reset_average() if it should start at the new weights.",
                    stacklevel=5,
                )
                return

    def compare_before_switch(
        self, evaluating: bool, name_of: Callable[[Tensor], str], stacklevel: int
    ) -> None:
        """Warn if a parameter differs from what the last step, or the last switch, left."""
        versions = [p._version for p in self._parameters]
        if self._warned_of_switch or versions == self._versions:
            return
        pairs = zip(self._parameters, versions, self._versions, strict=True)
        name = next(name_of(p) for p, version, before in pairs if version != before)
        self._warned_of_switch = True
        if evaluating:
            text = (
                f"{name} was changed since the last step by something other than this optimizer. "
                "Evaluation weights are computed from what it holds and from that step. If you "
                "have loaded evaluation weights, use them without eval() or evaluating(), or load "
                "the optimizer's state that was saved with them."
            )
        else:
            text = (
                f"{name} was changed in evaluation mode by something other than this optimizer. "
                "The change is lost now, because the training weights come back: load or change "
                "weights in training mode."
            )
        warnings.warn(text, stacklevel=stacklevel)

    def remember(self, parameters: list[Tensor] | None = None) -> None:
        """Remember the parameters as they are now; by default the same ones as before."""
        if parameters is not None:
            self._parameters = parameters
        self._versions = [p._version for p in self._parameters]
