"""The options of Neumann: their types and their ranges.

What each option means is in the docstring of :class:`neumann.Neumann`. A check changes nothing, so
a bad option never reaches the weights. The defaults that depend on P are in `defaults`.
"""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypedDict, get_type_hints

import torch
from torch import Tensor

from neumann.caller_warnings import warn_caller
from neumann.optim.phases import Timetable
from neumann.optim.preconditioners import NAMED, Preconditioner
from neumann.optim.preconditioners.protocol import describe_missing, is_preconditioner
from neumann.validation import is_count, is_number, require


class OwnOptions(TypedDict):
    """What may differ between parameter groups."""

    lr: float | Tensor
    momentum: float
    weight_decay: float
    decoupled_weight_decay: bool
    precondition: str | Preconditioner | None
    maximize: bool


class CommonOptions(TypedDict):
    """What must agree in all groups, because there is one clock and one distance."""

    cubic: float
    repulsive: float
    average: float
    bounded: bool
    variables: str | int
    warmup_steps: int
    reset_steps: int
    reset_growth: float
    skip_nonfinite: bool
    state_dtype: torch.dtype | None
    foreach: bool | None
    differentiable: bool
    capturable: bool
    fused: bool | None
    training: bool  # the mode: whether the parameters hold w or w − μm


class GroupOptions(OwnOptions, CommonOptions):
    """A parameter group, apart from its parameters."""


OWN = tuple(OwnOptions.__annotations__)
COMMON = tuple(CommonOptions.__annotations__)
MACHINE = ("foreach", "fused", "capturable")  # say how steps run here, not what they compute
_TYPES = get_type_hints(GroupOptions)
_FLAGS = [name for name, kind in _TYPES.items() if kind in (bool, bool | None)]
STATE_DTYPES = (None, torch.float64, torch.float32, torch.bfloat16, torch.float16)

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


@dataclass(frozen=True)
class StepOptions:
    """What a step needs of the options that all groups have in common."""

    timetable: Timetable
    cubic: float  # α
    repulsive: float  # β, times the number of variables
    average: float  # γ
    bounded: bool

    @property
    def has_forces(self) -> bool:
        """Whether a force acts. β times the number of variables is 0 if all of them are frozen."""
        return bool(self.cubic or self.repulsive)


def keeps_average(group: Mapping[str, Any]) -> bool:
    """Whether a group has forces, and therefore an average to keep."""
    return bool(group["cubic"] or group["repulsive"])


def to_plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """The group with Python numbers instead of NumPy's, which checkpoints could not load."""
    return {key: _to_plain(value) for key, value in group.items()}


def _to_plain(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def make_lr_capturable(group: dict[str, Any]) -> None:
    """Move the learning rate to the device: a captured graph reads it there."""
    if group["capturable"] and group["params"]:
        group["lr"] = torch.as_tensor(
            group["lr"], dtype=torch.float64, device=group["params"][0].device
        )


# ------------------------------------------------------------------ checks


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
                f"{name}={group[name]!r} in a parameter group: it belongs to the whole optimizer, "
                f"so pass {name} to Neumann itself"
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


def warn_of_cycled_momentum(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Warn if a scheduler such as OneCycleLR has taken over the momentum, and say whether."""
    cycled = any("max_momentum" in group for group in groups)
    if cycled:
        warn_caller(
            "a scheduler cycles the momentum, which replaces the peak of μ(t): pass "
            "cycle_momentum=False to OneCycleLR or CyclicLR unless you want that",
        )
    return cycled


def warn_of_missing_gradients(groups: Sequence[Sequence[Tensor | None]]) -> bool:
    """Warn if there are parameters and none has a gradient, and say whether."""
    missing = any(groups) and all(g is None for gradients in groups for g in gradients)
    if missing:
        warn_caller(
            "step() found no gradient at all, so no weight moves: call backward() before it, and "
            "build the optimizer after fully_shard and whatever else replaces parameters",
        )
    return missing


def check_agreement(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise if groups differ in an option that all share."""
    for index, group in enumerate(groups[1:], start=1):
        for name in COMMON:
            if group[name] != groups[0][name]:
                raise ValueError(
                    f"{name} must agree in all parameter groups: it is {groups[0][name]!r} in "
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
        raise ValueError(f"fused=True and {other}=True exclude each other: choose one")
    if group["capturable"] and (group["foreach"] is not None or group["differentiable"]):
        other = "differentiable" if group["differentiable"] else "foreach"
        raise ValueError(
            f"capturable=True belongs to the fused CUDA kernel, so leave {other} at its default"
        )
    if group["foreach"] and group["differentiable"]:
        raise ValueError(
            "foreach=True and differentiable=True exclude each other: only the single-tensor form "
            "is differentiable"
        )


def refuse_backward(optimizer: object, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise for an optimizer that torch steps inside backward, one parameter at a time."""
    first: Any = next((p for group in groups for p in group["params"]), None)
    if optimizer in getattr(first, "_in_backward_optimizers", ()):
        raise RuntimeError(
            "Neumann cannot step one parameter at a time inside backward: r is the distance of "
            "all parameters from their average, and they share one clock, so a step needs "
            "every gradient. Build one Neumann for all parameters and call its step() after "
            "backward() instead of _apply_optimizer_in_backward"
        )
