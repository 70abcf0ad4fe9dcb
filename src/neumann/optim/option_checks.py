"""The ranges of the options of Neumann, and which parameters it takes.

A check changes nothing, so a bad option never reaches the weights.
"""

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_type_hints

import torch
from torch import Tensor

from neumann.optim.options import COMMON, OWN, STATE_DTYPES, GroupOptions
from neumann.optim.preconditioners import NAMED
from neumann.optim.preconditioners.protocol import describe_missing, is_preconditioner
from neumann.validation import is_count, is_number, require

_TYPES = get_type_hints(GroupOptions)
_FLAGS = [name for name, kind in _TYPES.items() if kind in (bool, bool | None)]

# What torch's schedulers write into a group.
_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
# What other optimizers call an option, or have in its place.
_OTHER_NAMES = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "decay": "weight_decay",
    "decoupled": "decoupled_weight_decay",
    "precond": "precondition",
    "betas": "momentum",
    "mu": "momentum",
    "nesterov": "momentum",
}
# Options of the optimizer as a whole, which no group may set.
_OPTIMIZER_ONLY = ("steps_per_epoch", "warmup_epochs", "reset_epochs", "distributed")


def check_parameters(entries: Sequence[Any], taken: set[str]) -> None:
    """Raise for repeated parameters, repeated names, and tensors that cannot be written."""
    seen: set[int] = set()
    names = set(taken)
    for index, entry in enumerate(entries):
        name, parameter = entry if isinstance(entry, tuple) else (None, entry)
        called = f"number {index}" if name is None else repr(name)
        if id(parameter) in seen:
            raise ValueError(f"params holds the same parameter twice: {called} repeats another")
        seen.add(id(parameter))
        if name is not None and name in names:
            raise ValueError(f"params names two parameters {name!r}: names must differ")
        names.add(name)
        if isinstance(parameter, Tensor) and parameter.is_conj():
            raise ValueError(
                f"params holds a conjugate view, {called}, which has no memory of its own to "
                "update: pass its resolve_conj()"
            )
        if isinstance(parameter, Tensor) and _overlaps(parameter):
            raise ValueError(
                f"params holds an expanded tensor, {called}, whose elements share memory: pass "
                "the tensor that it was expanded from, or its clone()"
            )


def _overlaps(tensor: Tensor) -> bool:
    """Whether a dimension repeats the same memory, as `expand` makes it."""
    if tensor.layout != torch.strided or not tensor.numel():
        return False
    return any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def check_group(group: Mapping[str, Any]) -> None:
    """Raise for options outside their ranges."""
    for name in _OPTIMIZER_ONLY:
        if name in group:
            raise ValueError(
                f"{name}={group[name]!r} in a parameter group: it applies to the whole optimizer, "
                "so pass it to Neumann()"
            )
    _refuse_misspelled(group)
    check_scheduled(group)
    for name in ("cubic", "repulsive"):
        value = group[name]
        require(is_number(value) and value >= 0, name, value, "a finite number of at least 0")
    average = group["average"]
    require(is_number(average) and 0 <= average < 1, "average", average, "in [0, 1)")
    for name in ("warmup_steps", "reset_steps"):
        value = group[name]
        require(is_count(value) and value >= 0, name, value, "a whole number of at least 0")
    growth = group["reset_growth"]
    require(is_number(growth) and growth >= 1, "reset_growth", growth, "at least 1")
    if group["reset_steps"] == 1 and growth == 1:
        raise ValueError(
            "reset_steps=1 with reset_growth=1 makes every step a reset, so the weights never "
            "move: lengthen the interval or let it grow"
        )
    variables = group["variables"]
    require(
        variables in ("tensors", "elements") or (is_count(variables) and variables >= 1),
        "variables",
        variables,
        '"tensors", "elements" or a count of at least 1',
    )
    for name in _FLAGS:
        value = group[name]
        optional = _TYPES[name] == bool | None
        good = isinstance(value, bool) or (optional and value is None)
        require(good, name, value, "None, True or False" if optional else "True or False")
    state_dtype = group["state_dtype"]
    known = state_dtype in STATE_DTYPES
    wanted = "None, torch.bfloat16, torch.float16, torch.float32 or torch.float64"
    require(known, "state_dtype", state_dtype, wanted)
    check_preconditioner(group)
    _check_flags(group)


def _refuse_misspelled(group: Mapping[str, Any]) -> None:
    """Raise for a key that is almost an option. Others may be the user's own, as in torch."""
    known = {*OWN, *COMMON}
    for name in group:
        if name in known or name in _OF_SCHEDULERS:
            continue
        called = str(name).lower()
        near = get_close_matches(called, known, n=1, cutoff=0.8)
        if called in _OTHER_NAMES or near:
            meant = _OTHER_NAMES.get(called) or near[0]
            raise ValueError(f"{name!r} in a parameter group: did you mean {meant!r}?")


def check_scheduled(group: Mapping[str, Any]) -> None:
    """Raise for bad values of what schedulers change; cheap, and called before every step.

    A tensor on an accelerator is not checked: reading it would make the host wait.
    """
    lr, momentum, weight_decay = group["lr"], group["momentum"], group["weight_decay"]
    require_rate(lr)
    require(is_number(momentum) and 0 <= momentum < 1, "momentum", momentum, "in [0, 1)")
    good = is_number(weight_decay) and weight_decay >= 0
    require(good, "weight_decay", weight_decay, "a finite number of at least 0")


def require_rate(lr: Any) -> None:
    """Raise unless this is a learning rate: a number, or a tensor of one."""
    if isinstance(lr, Tensor):
        good = lr.numel() == 1 and not lr.is_complex() and lr.dtype != torch.bool
        good = good and (lr.device.type != "cpu" or 0 <= float(lr.detach()) < math.inf)
    else:
        good = is_number(lr) and lr >= 0
    require(good, "lr", lr, "a finite number of at least 0, or a tensor that holds one")


def check_agreement(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise if groups differ in an option that all share."""
    for index, group in enumerate(groups[1:], start=1):
        for name in COMMON:
            if group[name] != groups[0][name]:
                raise ValueError(
                    f"{name} must agree across parameter groups: it is {groups[0][name]!r} in "
                    f"group 0 and {group[name]!r} in group {index}"
                )


def check_preconditioner(group: Mapping[str, Any]) -> None:
    """Raise unless `precondition` is one; also called when it changes during training."""
    precondition = group["precondition"]
    named = precondition is None or isinstance(precondition, str)
    good = precondition in (None, *NAMED) if named else is_preconditioner(precondition)
    if not good:
        wanted = f"None, one of {', '.join(map(repr, NAMED))} or a Preconditioner"
        why = "" if named else describe_missing(precondition)
        raise ValueError(f"precondition must be {wanted}, got {precondition!r}{why}")
    if not named:
        _check_name(precondition)
        _check_before(precondition)
    if precondition is not None and group["differentiable"]:
        raise ValueError(
            "differentiable=True does not support a preconditioner: leave precondition at None"
        )


def _check_name(precondition: Any) -> None:
    """Raise for a name by which a checkpoint would take it for a built-in one."""
    ours = NAMED.get(precondition.name)
    if ours is not None and not isinstance(precondition, type(ours)):
        names = ", ".join(map(repr, NAMED))
        raise ValueError(
            f"a custom preconditioner must not be named {names}, got "
            f"{precondition.name!r} of {precondition!r}"
        )


def _check_before(precondition: Any) -> None:
    """Raise unless each `before` is another preconditioner."""
    chain = [precondition]
    while (before := getattr(chain[-1], "before", None)) is not None:
        good = is_preconditioner(before) and not any(before is stage for stage in chain)
        wanted = "None or another Preconditioner"
        require(good, f"before of the preconditioner {chain[-1].name!r}", before, wanted)
        chain.append(before)


def _check_flags(group: Mapping[str, Any]) -> None:
    """Raise for flags that contradict each other."""
    if group["fused"] and (group["foreach"] or group["differentiable"]):
        other = "foreach" if group["foreach"] else "differentiable"
        raise ValueError(f"fused=True and {other}=True cannot be combined: choose one")
    if group["capturable"] and (group["foreach"] is not None or group["differentiable"]):
        other = "differentiable" if group["differentiable"] else "foreach"
        raise ValueError(
            f"capturable=True needs the fused CUDA kernel, so leave {other} at its default"
        )
    if group["foreach"] and group["differentiable"]:
        raise ValueError(
            "foreach=True and differentiable=True cannot be combined: only the single-tensor form "
            "is differentiable"
        )
