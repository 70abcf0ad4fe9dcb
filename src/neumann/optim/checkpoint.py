"""Loading a state dict, so that no bit is lost; whether it fits is in `checkpoint_checks`.

`torch.optim.Optimizer.load_state_dict` casts every floating-point state tensor to the dtype of its
parameter (pytorch #43706), which loses float32 state of bfloat16 weights and float64 scalars. So
the tensors travel through it inside `Exact`, which it does not look into.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from neumann.caller_warnings import warn_caller
from neumann.optim import checkpoint_checks as checks
from neumann.optim import options
from neumann.optim.dtensor import local_part, place_like
from neumann.optim.preconditioners import memory
from neumann.optim.state import ITERATE, OFFSET, WEIGHTS, make_zeros


class Exact:
    """A tensor on its way through the base class, hidden from its casts."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def prepare(
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    names: Mapping[Tensor, str],
    find_backend: Callable[[Mapping[str, Any]], object],
) -> dict[str, Any]:
    """The state dict for the base class, if it fits: P itself, and tensors inside `Exact`.

    Everything is checked here, before the base class adopts anything. `find_backend` raises a
    RuntimeError for options that cannot run here.
    """
    checks.check_form(state_dict)
    groups = optimizer.param_groups
    checks.check_fits(groups, state_dict)
    saved = memory.resolve_names(groups, state_dict["param_groups"])
    saved = [{**optimizer.defaults, **options.to_plain(group)} for group in saved]
    _keep_own_names(saved, groups)
    checks.check_options(saved)
    checks.check_state(groups, names, {**state_dict, "param_groups": saved})
    memory.check_memory(groups, saved, state_dict["state"], names)
    _fit_to_machine(saved, groups[0], find_backend)
    state = {
        index: {k: Exact(v) if isinstance(v, Tensor) else v for k, v in entry.items()}
        for index, entry in state_dict["state"].items()
    }
    return {**state_dict, "param_groups": saved, "state": state}


def _keep_own_names(saved: Sequence[dict[str, Any]], own: Sequence[Mapping[str, Any]]) -> None:
    """Wrappers around the model, such as DDP, add to names, and this model may lack them."""
    for group, ours in zip(saved, own, strict=True):
        if "param_names" in ours:
            group["param_names"] = list(ours["param_names"])


def _fit_to_machine(
    saved: Sequence[dict[str, Any]],
    own: Mapping[str, Any],
    find_backend: Callable[[Mapping[str, Any]], object],
) -> None:
    """Replace flags of saved groups that cannot run here by the optimizer's own."""
    try:
        find_backend(saved[0])
    except RuntimeError as error:
        flags = {name: own[name] for name in options.MACHINE}
        find_backend({**saved[0], **flags})  # raises if the reason is another one
        was_captured = saved[0]["capturable"] and not flags["capturable"]
        for group in saved:
            group.update(flags)
            if was_captured:  # a number on a device, for the graph
                group["lr"] = float(group["lr"])
        kept = ", ".join(f"{name}={value}" for name, value in flags.items())
        warn_caller(
            f"the saved options cannot be used on this machine ({error}), so this optimizer keeps "
            f"{kept}",
        )


def complete(
    groups: Sequence[dict[str, Any]], states: Mapping[Tensor, Any], defaults: Mapping[str, Any]
) -> None:
    """Unwrap what the base class has adopted, and add what an older version did not save."""
    for group in groups:
        for name, value in defaults.items():
            group.setdefault(name, value)
        options.make_lr_capturable(group)
        for p in group["params"]:
            entry = states.get(p)
            if entry is not None:
                for key, value in entry.items():
                    if not key.startswith(memory.PREFIX):
                        entry[key] = _unwrap(value, key, p)
                memory.load_memory(entry, p, group)
                if ITERATE not in entry:
                    entry[ITERATE] = make_zeros(p, group)


def _unwrap(value: Any, key: str, parameter: Tensor) -> Any:
    """A copy of a wrapped tensor, on the parameter's device and laid out like it, in its own dtype.

    A copy, so that later steps do not change the loaded dictionary.
    """
    if not isinstance(value, Exact):
        return value
    if key not in (ITERATE, OFFSET, WEIGHTS):
        return value.tensor.clone()
    copied = torch.empty_like(parameter, dtype=value.tensor.dtype, requires_grad=False)
    local_part(copied).copy_(local_part(place_like(value.tensor, parameter)))
    return copied
