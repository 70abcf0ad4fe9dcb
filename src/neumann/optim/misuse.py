"""Errors and warnings for steps that cannot do what their caller wants.

A function that warns says whether it did, so that an optimizer warns only once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from neumann.caller_warnings import warn_caller


def refuse_backward(optimizer: object, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise for an optimizer that torch steps inside backward, one parameter at a time."""
    first: Any = next((p for group in groups for p in group["params"]), None)
    if optimizer in getattr(first, "_in_backward_optimizers", ()):
        raise RuntimeError(
            "Neumann cannot step one parameter at a time inside backward: r is the distance of "
            "all parameters from their average, and they share one clock, so a step needs "
            "every gradient. Build one Neumann for all parameters and call its step() after "
            "backward() instead of _apply_optimizer_in_backward"
        )


def warn_of_cycled_momentum(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Warn if a scheduler such as OneCycleLR has taken over the momentum, and say whether."""
    cycled = any("max_momentum" in group for group in groups)
    if cycled:
        warn_caller(
            "a scheduler cycles the momentum, which replaces the peak of μ(t): pass "
            "cycle_momentum=False to OneCycleLR or CyclicLR unless you want that",
        )
    return cycled


def warn_of_missing_gradients(groups: Sequence[Sequence[Tensor | None]]) -> bool:
    """Warn if there are parameters and none has a gradient, and say whether."""
    missing = any(groups) and all(g is None for gradients in groups for g in gradients)
    if missing:
        warn_caller(
            "step() found no gradient at all, so no weight moves: call backward() before it, and "
            "build the optimizer after fully_shard and whatever else replaces parameters",
        )
    return missing
