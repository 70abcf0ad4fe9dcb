"""Loading a state dict: does it fit, and do its bits arrive.

`torch.optim.Optimizer.load_state_dict` casts every floating-point state tensor to the dtype of its
parameter (pytorch #43706), which loses float32 state of bfloat16 weights and float64 scalars. The
tensors therefore travel through it inside `Exact`, which it does not look into.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Scalars that every parameter's state repeats; one tensor each for the optimizer or for the group.
CLOCK, DISTANCE, SKIPPED, MOMENTUM = "step", "distance_squared", "skipped", "momentum"
# Tensors shaped like the parameter: m, δ, and w while the parameter itself holds w − μm.
ITERATE, OFFSET, WEIGHTS = "iterate", "offset", "weights"
KEYS = (CLOCK, DISTANCE, SKIPPED, MOMENTUM, ITERATE, OFFSET, WEIGHTS)


class Exact:
    """A tensor on its way through the base class, which would cast it."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def wrap(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict with every state tensor inside `Exact`."""
    state = {
        index: {k: Exact(v) if isinstance(v, Tensor) else v for k, v in entry.items()}
        for index, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def unwrap(value: Any, key: str, parameter: Tensor) -> Any:
    """A copy of a wrapped tensor: on the parameter's device and laid out like it, its dtype kept.

    A copy, so that the loaded dictionary stays what it was when the optimizer steps on.
    """
    if not isinstance(value, Exact):
        return value
    if key in (ITERATE, OFFSET, WEIGHTS):
        return torch.empty_like(parameter, dtype=value.tensor.dtype).copy_(value.tensor)
    return value.tensor.clone()


def check_fits(
    groups: Sequence[Mapping[str, Any]], names: Mapping[Tensor, str], state_dict: Mapping[str, Any]
) -> None:
    """Refuse, saying what differs, a state dict of another model or of another optimizer."""
    saved_groups, state = state_dict["param_groups"], state_dict["state"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"the state dict has {len(saved_groups)} parameter groups, the optimizer {len(groups)}"
        )
    foreign = sorted({str(key) for entry in state.values() for key in entry} - set(KEYS))
    if foreign:
        raise ValueError(f"the state dict is of another optimizer: its state holds {foreign}")
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        parameters, keys = group["params"], saved["params"]
        if len(keys) != len(parameters):
            raise ValueError(
                f"group {index} has {len(keys)} parameters in the state dict and "
                f"{len(parameters)} in the optimizer"
            )
        ours, theirs = group.get("param_names"), saved.get("param_names")
        if ours and theirs and ours != theirs and set(ours) == set(theirs):
            at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            raise ValueError(
                f"group {index} has the same parameters in another order: number {at} is "
                f"{theirs[at]!r} in the state dict and {ours[at]!r} in the optimizer"
            )
        for parameter, key in zip(parameters, keys, strict=True):
            if saved.get("training", True) is False and WEIGHTS not in state.get(key, {WEIGHTS: 0}):
                raise ValueError(
                    "the state dict was saved in evaluation mode, but does not hold the training "
                    f"weights of {names[parameter]}"
                )
            for name in (ITERATE, OFFSET, WEIGHTS):
                value = state.get(key, {}).get(name)
                if value is not None and value.shape != parameter.shape:
                    raise ValueError(
                        f"{names[parameter]} has shape {tuple(parameter.shape)}, its {name} in "
                        f"the state dict {tuple(value.shape)}"
                    )
