"""A guard against saving the wrong weights: the displaced w as if they were the model.

`model.state_dict()` in the middle of training holds w. That is right for a checkpoint that resumes
the run, beside the optimizer's own state, and wrong for a model that is to be evaluated or shipped.
The guard cannot know what the dictionary is for, so it warns, once, and names both remedies.
"""

import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from neumann.optim.neumann import Neumann


class Guard:
    """What `guard` returns; :meth:`remove` takes the guard off again."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """No more warnings from this guard."""
        for handle in self._handles:
            handle.remove()


def neumann_inside(optimizer: object) -> Neumann | None:
    """The Neumann optimizer that this is or wraps, as trainers and ZeRO do; None if it is none."""
    while not isinstance(optimizer, Neumann):
        inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "optim", None)
        if not isinstance(inner, torch.optim.Optimizer):
            return None
        optimizer = inner
    return optimizer


def guard(model: nn.Module, optimizer: object) -> Guard:
    """Warn once when `model` is about to give away displaced weights as its state dict.

    Silent in evaluation mode, inside :meth:`Neumann.checkpointing`, and as long as the warm-up
    lasts, where w is what is to be evaluated. Parts of the model are guarded too, and whatever
    wraps it, but no copies of it, nor `torch.save` of the whole module, which makes no state dict.
    """
    inside = neumann_inside(optimizer)
    if inside is None:
        raise TypeError(f"optimizer must be or wrap a Neumann, got {type(optimizer).__name__}")
    owned = {p for group in inside.param_groups for p in group["params"]}
    owners = [m for m in model.modules() if not owned.isdisjoint(m.parameters(recurse=False))]
    if not owners:
        raise ValueError(
            "model holds none of the optimizer's parameters: build the optimizer from the model "
            "that is to be guarded, and guard it after it was moved, wrapped or sharded"
        )
    hook = _Hook(inside)
    handles: list[Any] = [
        owner.register_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
        for owner in owners
    ]
    return Guard(handles)


class _Hook:
    """Called by each module that has parameters of the optimizer, before its state dict is made.

    Hooks are pickled and copied with their module, so this one does not hold on to the optimizer,
    and arrives elsewhere without it.
    """

    def __init__(self, optimizer: Neumann | None) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None,)

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        optimizer = None if self._optimizer is None else self._optimizer()
        if self._warned or optimizer is None or not optimizer._holds_displaced_weights():
            return
        self._warned = True
        warnings.warn(
            "this state dict will hold the displaced weights w that training goes on from, not "
            "w − μm, the model that was found. To evaluate or ship the model, take it inside "
            "`with optimizer.evaluating():`. To resume this run, save it beside "
            "optimizer.state_dict() inside `with optimizer.checkpointing():`, which says that this "
            "is meant.",
            stacklevel=_levels_outside_torch(),
        )


def _levels_outside_torch() -> int:
    """How far up the caller is who asked torch for the state dict."""
    torch_itself = str(Path(torch.__file__).parent)
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        level, frame = level + 1, frame.f_back
        if not frame.f_code.co_filename.startswith(torch_itself):
            break
    return level
