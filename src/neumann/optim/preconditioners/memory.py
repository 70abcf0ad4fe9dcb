"""What a preconditioner remembers, and how a checkpoint says which one it was.

P's state is part of the optimizer's, under names that start with `preconditioner_`. State dicts
hold plain values: instead of P its name, with its options where they differ from the defaults.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, can_cast

from neumann.caller_warnings import warn_caller
from neumann.optim.dtensor import is_dtensor, local_part, place_like
from neumann.optim.preconditioners import NAMED, Preconditioner

PREFIX = "preconditioner_"


def preconditioner_of(group: Mapping[str, Any]) -> Preconditioner | None:
    """The group's P; None is the identity."""
    chosen = group["precondition"]
    return NAMED[chosen] if isinstance(chosen, str) else chosen


def stages_of(preconditioner: Preconditioner | None) -> list[Preconditioner]:
    """The preconditioners to apply one after the other: P and what comes `before` it."""
    if preconditioner is None:
        return []
    return [*stages_of(getattr(preconditioner, "before", None)), preconditioner]


def create_memory(p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """P's state for a new parameter, under the names it has in the optimizer's state."""
    state: dict[str, Tensor] = {}
    for stage in stages_of(preconditioner_of(group)):
        whole = p
        if is_dtensor(p) and not stage.elementwise(p):
            whole = local_part(p).new_empty(1).expand(p.shape)  # its shape without its memory
        made = stage.create(whole)
        if not isinstance(made, dict) or not all(isinstance(v, Tensor) for v in made.values()):
            raise ValueError(
                f"create of the preconditioner {stage.name!r} must return a dict of tensors, "
                f"got {made!r}"
            )
        narrow = getattr(stage, "narrow", ()) if group["state_dtype"] is torch.bfloat16 else ()
        for key, value in made.items():
            if PREFIX + key in state:
                raise ValueError(
                    f"the preconditioner {stage.name!r} and one before it both keep {key!r}: "
                    "rename one"
                )
            narrowed = key in narrow and not value.is_complex()  # as for m
            state[PREFIX + key] = value.to(torch.bfloat16) if narrowed else value
    return state


def check_memory(
    groups: Sequence[Mapping[str, Any]],
    saved: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Mapping[str, Any]],
    names: Mapping[Tensor, str],
) -> None:
    """Raise if saved state of P has other shapes or dtypes than P's own; changes nothing."""
    for ours, theirs in zip(groups, saved, strict=True):
        group = {**ours, **theirs}
        for p, key in zip(ours["params"], theirs["params"], strict=True):
            entry = state.get(key, {})
            if not any(str(name).startswith(PREFIX) for name in entry):
                continue
            for name, fresh in create_memory(p, group).items():
                if name not in entry:
                    continue
                value = entry[name]
                if not isinstance(value, Tensor) or not can_cast(value.dtype, fresh.dtype):
                    got = value.dtype if isinstance(value, Tensor) else repr(value)
                    raise ValueError(
                        f"{names[p]} needs {name} as a tensor of {fresh.dtype}, and the state "
                        f"dict has {got}"
                    )
                if value.shape != fresh.shape:
                    raise ValueError(
                        f"{names[p]} needs {name} of shape {tuple(fresh.shape)}, and the state "
                        f"dict has {tuple(value.shape)}"
                    )


def load_memory(state: dict[str, Any], p: Tensor, group: Mapping[str, Any]) -> None:
    """Copy P's part of the state into fresh tensors; drops what another P has left."""
    loaded = {key: state.pop(key) for key in list(state) if key.startswith(PREFIX)}
    for key, fresh in create_memory(p, group).items():
        value = loaded.get(key)
        if value is not None:
            tensor = getattr(value, "tensor", value)  # inside checkpoint.Exact
            placed = place_like(tensor, fresh)
            if not is_dtensor(fresh) and placed.shape == fresh.shape:
                # Its own layout, not the parameter's, which may be another since `Module.to`: the
                # noise of `narrow_memory` follows the layout, and a resumed run needs the same.
                fresh = torch.empty_like(placed, dtype=fresh.dtype, device=fresh.device)
            local_part(fresh).copy_(local_part(placed))
        state[key] = fresh


def write_names(groups: Sequence[dict[str, Any]]) -> None:
    """Replace each P by its name: state dicts hold plain values."""
    for group in groups:
        if group["precondition"] is not None:
            group["precondition"] = _spell(group["precondition"])


def resolve_names(
    groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The saved groups with P itself instead of its name.

    Only built-in preconditioners can be made from a name. If the optimizer has the same P with
    other options, those win: the user has just chosen them. If it has another P that is an object,
    which no checkpoint can bring back, a warning says which one is used from now on.
    """
    result = []
    for index, (ours, theirs) in enumerate(zip(groups, saved, strict=True)):
        group, own = dict(theirs), ours["precondition"]
        result.append(group)
        if "precondition" not in theirs:
            continue
        saved_as, called = theirs["precondition"], None if own is None else _spell(own)
        if saved_as is not None and not isinstance(saved_as, str):
            raise ValueError(
                f"group {index} of the state dict: precondition must be None or a name, got "
                f"{saved_as!r}"
            )
        is_object = own is not None and not isinstance(own, str)
        if called == saved_as or (is_object and _name(called) == _name(saved_as)):
            group["precondition"] = own
        elif saved_as is not None and saved_as not in NAMED:
            raise ValueError(
                f"group {index} was saved with the preconditioner {saved_as!r}, and the optimizer "
                f"has {own!r}: build the optimizer with the saved one"
            )
        if is_object and called != saved_as:
            stays = called if group["precondition"] is own else saved_as
            warn_caller(
                f"group {index} was saved with the preconditioner {saved_as!r} and the optimizer "
                f"has {called!r}; it continues with {stays!r}",
            )
    return result


def _name(spelled: str | None) -> str | None:
    return None if spelled is None else spelled.partition(":")[0]


def _spell(chosen: Any) -> str:
    """P's name, with its options where they are known and differ from the defaults."""
    if isinstance(chosen, str):
        return chosen
    name = str(chosen.name)
    usual = chosen == NAMED.get(name) or not (is_dataclass(chosen) and fields(chosen))
    return name if usual else f"{name}: {chosen!r}"
