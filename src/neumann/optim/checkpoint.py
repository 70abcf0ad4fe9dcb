"""Loading a state dict: whether it fits, and that no bit is lost.

`torch.optim.Optimizer.load_state_dict` casts every floating-point state tensor to the dtype of its
parameter (pytorch #43706), which loses float32 state of bfloat16 weights and float64 scalars. So
the tensors travel through it inside `Exact`, which it does not look into.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from neumann.optim.dtensor import local_part, place_like
from neumann.optim.preconditioners import memory
from neumann.optim.state import ITERATE, KEYS, OFFSET, WEIGHTS, make_zeros

# Options that only Neumann has, and names that wrappers add to those of parameters.
OPTIONS = ("warmup_steps", "reset_steps", "cubic", "repulsive")
WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


class Exact:
    """A tensor on its way through the base class, hidden from its casts."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def prepare(
    optimizer: Optimizer, state_dict: Mapping[str, Any], names: Mapping[Tensor, str]
) -> dict[str, Any]:
    """The state dict for the base class, if it fits: P itself, and tensors inside `Exact`."""
    groups = optimizer.param_groups
    check_fits(groups, names, state_dict)
    saved = memory.resolve_names(groups, state_dict["param_groups"])
    memory.check_shapes(groups, saved, state_dict["state"], names)
    state = {
        index: {k: Exact(v) if isinstance(v, Tensor) else v for k, v in entry.items()}
        for index, entry in state_dict["state"].items()
    }
    return {**state_dict, "param_groups": saved, "state": state}


def complete(
    groups: Sequence[dict[str, Any]], states: Mapping[Tensor, Any], defaults: Mapping[str, Any]
) -> None:
    """Unwrap what the base class has adopted, and add what an older version did not save."""
    for group in groups:
        for name, value in defaults.items():
            group.setdefault(name, value)
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


def check_fits(
    groups: Sequence[Mapping[str, Any]], names: Mapping[Tensor, str], state_dict: Mapping[str, Any]
) -> None:
    """Raise, saying what differs, for a state dict of another model or another optimizer."""
    saved_groups, state = state_dict["param_groups"], state_dict["state"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"the state dict has {len(saved_groups)} parameter groups, the optimizer {len(groups)}"
        )
    known = {str(key) for entry in state.values() for key in entry}
    foreign = sorted(k for k in known - set(KEYS) if not k.startswith(memory.PREFIX))
    if foreign:
        raise ValueError(f"the state dict belongs to another optimizer: its state holds {foreign}")
    if not all(any(key in saved for key in OPTIONS) for saved in saved_groups):
        raise ValueError(
            "the state dict belongs to another optimizer: it has none of Neumann's options"
        )
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        parameters, keys = group["params"], saved["params"]
        if len(keys) != len(parameters):
            raise ValueError(
                f"group {index} has {len(keys)} parameters in the state dict and "
                f"{len(parameters)} in the optimizer"
            )
        ours, theirs = _bare(group.get("param_names")), _bare(saved.get("param_names"))
        if ours and theirs and ours != theirs:
            at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            order = " in another order" if set(ours) == set(theirs) else ""
            raise ValueError(
                f"group {index} has other parameters{order}: number {at} is {theirs[at]!r} in the "
                f"state dict and {ours[at]!r} in the optimizer"
            )
        for parameter, key in zip(parameters, keys, strict=True):
            entry = state.get(key, {})
            missing = ITERATE in entry and WEIGHTS not in entry
            if (
                missing
                and not saved.get("training", True)
                and bool(local_part(entry[ITERATE]).any())
            ):
                raise ValueError(
                    "the state dict was saved in evaluation mode, but lacks the training weights "
                    f"of {names[parameter]}. A distributed checkpoint loads only what the "
                    "optimizer already has: call optimizer.eval() before you load it"
                )
            for name in (ITERATE, OFFSET, WEIGHTS):
                value = entry.get(name)
                if value is not None and value.shape != parameter.shape:
                    raise ValueError(
                        f"{names[parameter]} has shape {tuple(parameter.shape)}, its {name} in "
                        f"the state dict {tuple(value.shape)}"
                    )


def _bare(names: Sequence[str] | None) -> list[str]:
    """The names without what wrappers around the model add."""
    return [
        ".".join(part for part in name.split(".") if part not in WRAPPERS) for name in names or ()
    ]
