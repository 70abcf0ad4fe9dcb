"""A guard against mixing up w and w − μm where a model's weights are saved and loaded.

During training `model.state_dict()` holds w. That is right for a checkpoint that resumes the run,
together with the optimizer's state, and wrong for a model to evaluate or ship. The guard cannot
know what the dictionary is for, so it warns once and names both remedies.

Weights that the model loads on their own do not belong to the optimizer's m. A switch to evaluation
would still subtract μm from them, and a switch to training would replace them by w. The guard
tells the optimizer of the load, and the optimizer warns at the switch.
"""

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from neumann.caller_warnings import locate_caller, warn_caller
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
    """Warn when weights of `model` are saved or loaded in the wrong mode.

    It warns when a state dict holds displaced weights, once for each line of your program
    that takes one. It does not warn in evaluation mode, inside :meth:`Neumann.checkpointing`, or
    during the warm-up, where w is what to evaluate.

    After `model.load_state_dict` it warns if the next switch to evaluation subtracts μm from the
    loaded weights, or if the next switch to training replaces them. It does not warn if the
    optimizer loads a state too, or takes a step first.

    It also sees the model's submodules and wrappers around the model. It does not see copies of the
    model, or `torch.save` of the whole module, which makes no state dict.

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
    saving, loading = _Hook(inside), _LoadingHook(inside)
    handles: list[Any] = []
    for owner in owners:
        handles += [
            owner.register_state_dict_pre_hook(saving),  # type: ignore[no-untyped-call]
            owner.register_load_state_dict_pre_hook(loading),  # type: ignore[no-untyped-call]
        ]
    return Guard(handles)


class _WeakHook:
    """A hook of each module with parameters of the optimizer.

    Hooks are pickled and copied with their module, so this one only refers weakly to the optimizer,
    and a copy has none.
    """

    def __init__(self, optimizer: Neumann | None) -> None:
        self._reference = None if optimizer is None else weakref.ref(optimizer)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None,)

    def _optimizer(self) -> Neumann | None:
        return None if self._reference is None else self._reference()


class _LoadingHook(_WeakHook):
    """Runs before a module loads its part of a state dict, which may have nothing of it."""

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any
    ) -> None:
        optimizer = self._optimizer()
        names = (name for name, _ in module.named_parameters(recurse=False))
        if optimizer is not None and any(f"{prefix}{name}" in state_dict for name in names):
            optimizer.note_loaded_weights()


class _Hook(_WeakHook):  # under this name in models that were pickled with version 0.1
    """Runs before a module makes its part of a state dict."""

    def __init__(self, optimizer: Neumann | None) -> None:
        super().__init__(optimizer)
        self._warned_at: set[tuple[str, int]] = set()

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        optimizer = self._optimizer()
        if optimizer is None or not optimizer.holds_displaced_weights():
            return
        place = locate_caller()  # one that keeps an average, say, is not the one that saves
        if place in self._warned_at:
            return
        self._warned_at.add(place)
        warn_caller(
            "this state dict will hold the displaced weights w that training continues from, not "
            "w − μm, the trained model. To evaluate or ship the model, take it inside "
            "`with optimizer.evaluating():`. To resume this run, save it together with "
            "optimizer.state_dict() inside `with optimizer.checkpointing():`, which says that this "
            "is intended.",
        )
