"""Warnings when something other than the optimizer writes to its parameters."""

from collections.abc import Callable
from operator import is_

from torch import Tensor

from neumann.caller_warnings import warn_caller
from neumann.optim import modes

_DISPLACED = (
    "the model has loaded weights since the last step, and the optimizer has now subtracted μm "
    "from them, but that μm belongs to the weights they replaced. If they were saved in "
    "evaluation mode, do not call eval() or evaluating(). To continue from a checkpoint, load the "
    "optimizer's state dict too. (Ignore this if you have put the old weights back.)"
)
_LOST = (
    "the weights that the model loaded in evaluation mode are gone: the switch to training mode "
    "restored the earlier weights w. Load weights in training mode, outside of evaluating(); with "
    "a trainer, build a new one."
)


class WriteWatch:
    """Knows what the last step left in the parameters, and warns if something else was written.

    Loading or clamping weights between two steps moves w and leaves δ = w − v alone, so the average
    moves along. That may be intended, but should not go unnoticed: `compare` warns once. A tensor
    counts its in-place writes in `_version`; the kernels, which write past torch, count theirs
    there too.

    Weights that a guarded model loads do not belong to m either: `judge_load` says what the next
    switch of modes does to them.
    """

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._versions: list[int] = []
        self._warned = False
        self._has_stepped = False
        self._has_loaded = False  # since the last step

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
                    "optimizer. The average moved by the same amount; call "
                    "optimizer.reset_average() to start it at the new weights instead.",
                )
                return

    def remember(self, parameters: list[Tensor] | None = None) -> None:
        """Remember the parameters as they are now; by default the same ones as before."""
        if parameters is not None:
            self._parameters = parameters
            self._has_stepped, self._has_loaded = True, False
        self._versions = [p._version for p in self._parameters]

    def note_load(self) -> None:
        """The model has loaded weights. Before the first step they belong to a loaded state."""
        self._has_loaded = self._has_stepped

    def forget_versions(self) -> None:
        """Parameters have been added, replaced or moved: nothing is known of what they hold."""
        self._parameters, self._versions = [], []

    def judge_load(
        self, mode: bool, entries: modes.Entries, is_displaced: Callable[[], bool]
    ) -> str | None:
        """What is wrong about a switch to `mode` after a load; each load is judged once.

        Call it before the switch: it compares the parameters with the evaluation weights.
        """
        has_loaded, self._has_loaded = self._has_loaded, False
        if not has_loaded:
            return None
        if mode:
            return _LOST if modes.differs_from_evaluation(entries) else None
        return _DISPLACED if is_displaced() else None
