"""A guard against saving the wrong weights: the displaced w as if they were the model.

`model.state_dict()` in the middle of training holds w. That is right for a checkpoint that resumes
the run, beside the optimizer's own state, and wrong for a model that is to be evaluated or shipped.
The guard cannot know what the dictionary is for, so it warns, once, and names both remedies.
"""

import warnings
import weakref
from typing import Any

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


def guard(model: nn.Module, optimizer: Neumann) -> Guard:
    """Warn once when `model` is about to give away displaced weights as its state dict.

    Silent in evaluation mode, inside :meth:`Neumann.checkpointing`, and as long as the warm-up
    lasts, where w is what is to be evaluated. Parts of the model are guarded too, and whatever
    wraps it, but no copies of it.
    """
    owned = {p for group in optimizer.param_groups for p in group["params"]}
    owners = [m for m in model.modules() if not owned.isdisjoint(m.parameters(recurse=False))]
    if not owners:
        raise ValueError(
            "model holds none of the optimizer's parameters: build the optimizer from the model "
            "that is to be guarded, and guard it after it was moved, wrapped or sharded"
        )
    hook = _Hook(optimizer)
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
            stacklevel=3,
        )
