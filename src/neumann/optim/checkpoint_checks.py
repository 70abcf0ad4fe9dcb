"""Whether a state dict fits an optimizer, and could have been saved by one.

Every check comes before anything is adopted, and none changes anything. An error says in one line
what is wrong, and of which parameter or group.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from neumann.optim import option_checks, options
from neumann.optim.dtensor import local_part
from neumann.optim.preconditioners.memory import PREFIX
from neumann.optim.state import (
    CLOCK,
    DISTANCE,
    ITERATE,
    KEYS,
    MOMENTUM,
    OFFSET,
    SKIPPED,
    WEIGHTS,
)

# Options that only Neumann has, and names that wrappers add to those of parameters.
OPTIONS = ("warmup_steps", "reset_steps", "cubic", "repulsive")
WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def check_form(state_dict: Any) -> None:
    """Raise unless this has the form of a state dict of torch.optim."""
    if not (isinstance(state_dict, dict) and _has_groups(state_dict) and _has_state(state_dict)):
        raise ValueError(
            "the state dict must hold param_groups, a list of dicts that each list their params, "
            "and state, a dict with a dict for each parameter, as Neumann.state_dict() makes them"
        )
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    if len(set(keys)) != len(keys):
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the state dict lists parameter {repeated!r} twice in its groups")


def _has_groups(state_dict: Mapping[str, Any]) -> bool:
    groups = state_dict.get("param_groups")
    return isinstance(groups, list | tuple) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list | tuple)
        and all(isinstance(key, int | str) for key in group["params"])
        and _are_names(group.get("param_names"), len(group["params"]))
        for group in groups
    )


def _are_names(names: Any, count: int) -> bool:
    if names is None:
        return True
    is_list = isinstance(names, list | tuple) and len(names) == count
    return is_list and all(isinstance(name, str) for name in names)


def _has_state(state_dict: Mapping[str, Any]) -> bool:
    state = state_dict.get("state")
    return isinstance(state, dict) and all(isinstance(entry, dict) for entry in state.values())


def check_fits(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Raise, saying what differs, for a state dict of another model or another optimizer."""
    saved_groups, state = state_dict["param_groups"], state_dict["state"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"the state dict has {len(saved_groups)} parameter groups, the optimizer {len(groups)}"
        )
    known = {str(key) for entry in state.values() for key in entry}
    foreign = sorted(k for k in known - set(KEYS) if not k.startswith(PREFIX))
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


def check_state(
    groups: Sequence[Mapping[str, Any]], names: Mapping[Tensor, str], state_dict: Mapping[str, Any]
) -> None:
    """Raise for state that no step could have left; the state dict has passed `check_fits`."""
    state = state_dict["state"]
    checked: dict[str, set[int]] = {key: set() for key in KEYS}  # usually one tensor for all
    clocks: dict[int, str] = {}
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            entry, name = state.get(key, {}), names[parameter]
            for what in (CLOCK, SKIPPED, DISTANCE, MOMENTUM):
                if what in entry and id(entry[what]) not in checked[what]:
                    checked[what].add(id(entry[what]))
                    number = _check_scalar(what, entry[what], name)
                    if what == CLOCK and number is not None:
                        clocks.setdefault(int(number), name)
            for what in (ITERATE, OFFSET, WEIGHTS):
                if what in entry:
                    _check_tensor(what, entry[what], parameter, name)
            is_displaced = ITERATE in entry and WEIGHTS not in entry
            if not saved["training"] and is_displaced and bool(local_part(entry[ITERATE]).any()):
                raise ValueError(
                    "the state dict was saved in evaluation mode, but lacks the training weights "
                    f"of {name}. A distributed checkpoint loads only what the "
                    "optimizer already has: call optimizer.eval() before you load it"
                )
    if len(clocks) > 1:
        (first, one), (second, other) = list(clocks.items())[:2]
        raise ValueError(
            f"the state dict is inconsistent: {CLOCK} is {first} for {one}, {second} for {other}"
        )


def _check_scalar(what: str, value: Any, name: str) -> float | None:
    """The scalar as a number; None if it is on no device yet."""
    value = local_part(value)
    if isinstance(value, Tensor) and value.is_meta:
        return None
    is_scalar = not isinstance(value, Tensor) or (value.numel() == 1 and not value.is_complex())
    number = value.item() if isinstance(value, Tensor) and is_scalar else value
    good, wanted = isinstance(number, int | float) and not isinstance(number, bool), "a number"
    if what in (CLOCK, SKIPPED):
        good = good and 0 <= number < 1 << 62 and number == int(number)
        wanted = "a whole number of at least 0"
    elif what == MOMENTUM:
        good, wanted = good and 0 <= number < 1, "in [0, 1)"
    else:
        good, wanted = good and not number < 0, "a number of at least 0"
    if not good:
        raise ValueError(
            f"{what} of {name} in the state dict must be {wanted}, got {_describe(number)}"
        )
    return number


def _check_tensor(what: str, value: Any, parameter: Tensor, name: str) -> None:
    if isinstance(value, Tensor) and value.shape != parameter.shape:
        raise ValueError(
            f"{name} has shape {tuple(parameter.shape)}, its {what} in the state dict "
            f"{tuple(value.shape)}"
        )
    good = isinstance(value, Tensor) and value.layout == torch.strided
    kind = "complex" if parameter.is_complex() else "floating-point"
    if good:
        real = torch.empty(0, dtype=value.dtype).real.dtype
        good = value.is_complex() == parameter.is_complex() and real in options.STATE_DTYPES
    if not good:
        raise ValueError(
            f"{what} of {name} in the state dict must be a dense {kind} tensor, got "
            f"{_describe(value)}"
        )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    return repr(value)


def check_options(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise for options that the constructor would refuse."""
    for index, group in enumerate(groups):
        try:
            option_checks.check_group(group)
        except (TypeError, ValueError) as error:
            raise ValueError(f"group {index} of the state dict: {error}") from None
    option_checks.check_agreement(groups)


def _bare(names: Sequence[str] | None) -> list[str]:
    """The names without what wrappers around the model add."""
    return [
        ".".join(part for part in name.split(".") if part not in WRAPPERS) for name in names or ()
    ]
