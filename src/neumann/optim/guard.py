"""A guard against saving the wrong weights: the displaced w as if they were the model.

During training `model.state_dict()` holds w. That is right for a checkpoint that resumes the run,
together with the optimizer's state, and wrong for a model to evaluate or ship. The guard cannot
know what the dictionary is for, so it warns once and names both remedies.
"""

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from neumann.caller_warnings import warn_caller
from neumann.optim.neumann import Neumann


class Guard:
    """What `guard` returns; :meth:`remove` removes the guard."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Stop warning."""
        for handle in self._handles:
            handle.remove()


def find_neumann(optimizer: object) -> Neumann | None:
    """The Neumann that this is or wraps, as trainers and ZeRO do; None if there is none."""
    while not isinstance(optimizer, Neumann):
        inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "optim", None)
        if not isinstance(inner, torch.optim.Optimizer):
            return None
        optimizer = inner
    return optimizer


def guard(model: nn.Module, optimizer: object) -> Guard:
    """Warn once when the state dict of `model` is about to hold displaced weights.

    It does not warn in evaluation mode, inside :meth:`Neumann.checkpointing`, or during the
    warm-up, where w is what to evaluate. It covers the model's parts and wrappers around the model,
    but not copies of it, nor `torch.save` of the whole module, which makes no state dict.

    Args:
        model: the model, after it was moved, wrapped or sharded.
        optimizer: a Neumann, or something that wraps one.

    Returns:
        A handle to remove the guard.
    """
    inside = find_neumann(optimizer)
    if inside is None:
        raise TypeError(f"optimizer must be or wrap a Neumann, got {type(optimizer).__name__}")
    owned = {p for group in inside.param_groups for p in group["params"]}
    owners = [m for m in model.modules() if not owned.isdisjoint(m.parameters(recurse=False))]
    if not owners:
        raise ValueError(
            "model holds none of the optimizer's parameters: build the optimizer from the model "
            "to guard, and guard it after moving, wrapping or sharding it"
        )
    hook = _Hook(inside)
    handles: list[Any] = [
        owner.register_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
        for owner in owners
    ]
    return Guard(handles)


class _Hook:
    """Runs before each module with parameters of the optimizer makes its state dict.

    Hooks are pickled and copied with their module, so this one only refers weakly to the optimizer,
    and a copy has none.
    """

    def __init__(self, optimizer: Neumann | None) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None,)

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        optimizer = None if self._optimizer is None else self._optimizer()
        if self._warned or optimizer is None or not optimizer.holds_displaced_weights():
            return
        self._warned = True
        warn_caller(
            "this state dict will hold the displaced weights w that training continues from, not "
            "w − μm, the trained model. To evaluate or ship the model, take it inside "
            "`with optimizer.evaluating():`. To resume this run, save it together with "
            "optimizer.state_dict() inside `with optimizer.checkpointing():`, which says that this "
            "is intended.",
        )
