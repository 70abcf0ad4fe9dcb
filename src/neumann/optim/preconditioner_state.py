"""What a preconditioner remembers, and how a checkpoint tells which one it was.

P's state lies in the optimizer's, under names that begin with `preconditioner_`. State dicts hold
plain values: in the place of P its name, with its options where they are not the usual ones.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from neumann.optim.checkpoint import PRECONDITIONER
from neumann.optim.preconditioners import Preconditioner
from neumann.optim.shards import is_dtensor, local, placed_like
from neumann.optim.spectral import NAMED


def preconditioner_of(group: Mapping[str, Any]) -> Preconditioner | None:
    """The group's P; None is the identity."""
    chosen = group["precondition"]
    return NAMED[chosen] if isinstance(chosen, str) else chosen


def stages(preconditioner: Preconditioner | None) -> list[Preconditioner]:
    """P as what is done to the gradients one after the other."""
    if preconditioner is None:
        return []
    return [*stages(getattr(preconditioner, "before", None)), preconditioner]


def created(p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """P's state of a new parameter, under the names it has in the optimizer's."""
    state: dict[str, Tensor] = {}
    for stage in stages(preconditioner_of(group)):
        whole = p
        if is_dtensor(p) and not stage.elementwise(p):
            whole = local(p).new_empty(1).expand(p.shape)  # its shape, without its memory
        made = stage.create(whole)
        if not isinstance(made, dict) or not all(isinstance(v, Tensor) for v in made.values()):
            raise ValueError(
                f"create of the preconditioner {stage.name!r} must give a dict of tensors, "
                f"got {made!r}"
            )
        for key, value in made.items():
            if PRECONDITIONER + key in state:
                raise ValueError(
                    f"the preconditioner {stage.name!r} and one before it both keep {key!r}"
                )
            state[PRECONDITIONER + key] = value
    return state


def check_loaded(
    groups: Sequence[Mapping[str, Any]],
    saved: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Mapping[str, Any]],
    names: Mapping[Tensor, str],
) -> None:
    """Refuse state of other shapes than P's before anything is changed."""
    for ours, theirs in zip(groups, saved, strict=True):
        group = {**ours, **theirs}
        for p, key in zip(ours["params"], theirs["params"], strict=True):
            entry = state.get(key, {})
            if not any(str(name).startswith(PRECONDITIONER) for name in entry):
                continue
            for name, fresh in created(p, group).items():
                if name in entry and entry[name].shape != fresh.shape:
                    raise ValueError(
                        f"{names[p]} needs {name} of shape {tuple(fresh.shape)}, and that in the "
                        f"state dict has {tuple(entry[name].shape)}"
                    )


def load(state: dict[str, Any], p: Tensor, group: Mapping[str, Any]) -> None:
    """Put P's share of the state into fresh tensors: what another P has left is dropped."""
    loaded = {key: state.pop(key) for key in list(state) if key.startswith(PRECONDITIONER)}
    for key, fresh in created(p, group).items():
        value = loaded.get(key)
        if value is not None:
            tensor = getattr(value, "tensor", value)  # inside checkpoint.Exact
            local(fresh).copy_(local(placed_like(tensor, fresh)))
        state[key] = fresh


def name_in(groups: Sequence[dict[str, Any]]) -> None:
    """Write how P is spelled in the place of an object: state dicts hold plain values."""
    for group in groups:
        if group["precondition"] is not None:
            group["precondition"] = _spelled(group["precondition"])


def adopted(
    groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The saved groups with P itself in the place of how it is spelled.

    Only what has a name of ours can be made from it. Of a P with other options that the optimizer
    has in its place, these count: somebody has just chosen them. Another P than the saved one does
    not go on, and where it is an object, which no checkpoint can bring back, that is said.
    """
    result = []
    for index, (ours, theirs) in enumerate(zip(groups, saved, strict=True)):
        group, own = dict(theirs), ours["precondition"]
        result.append(group)
        if "precondition" not in theirs:
            continue
        saved_as, called = theirs["precondition"], None if own is None else _spelled(own)
        is_object = own is not None and not isinstance(own, str)
        if called == saved_as or (is_object and _name(called) == _name(saved_as)):
            group["precondition"] = own
        elif saved_as is not None and saved_as not in NAMED:
            raise ValueError(
                f"group {index} was saved with the preconditioner {saved_as!r}, and the optimizer "
                f"has {own!r}: build it with that preconditioner"
            )
        if is_object and called != saved_as:
            stays = called if group["precondition"] is own else saved_as
            warnings.warn(
                f"group {index} was saved with the preconditioner {saved_as!r}, the optimizer has "
                f"{called!r}, and it goes on with {stays!r}",
                stacklevel=5,
            )
    return result


def _name(spelled: str | None) -> str | None:
    return None if spelled is None else spelled.partition(":")[0]


def _spelled(chosen: Any) -> str:
    """P's name, with its options where they are known and not the usual ones."""
    if isinstance(chosen, str):
        return chosen
    name = str(chosen.name)
    usual = chosen == NAMED.get(name) or not (is_dataclass(chosen) and fields(chosen))
    return name if usual else f"{name}: {chosen!r}"
