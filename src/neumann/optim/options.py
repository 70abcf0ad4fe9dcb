"""The hyperparameters of Neumann: what is allowed, and how epochs become steps.

A check returns nothing and changes nothing, so that a refused option never gets as far as the
weights.
"""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from neumann.optim.checks import is_count, is_number, require
from neumann.optim.preconditioners import is_preconditioner, lacking
from neumann.optim.spectral import NAMED

# One number over all groups: r is global, and so is the clock.
SHARED = (
    "cubic",
    "repulsive",
    "average",
    "bounded",
    "variables",
    "warmup_steps",
    "reset_steps",
    "reset_growth",
    "skip_nonfinite",
    "state_dtype",
    "foreach",
    "differentiable",
    "capturable",
    "fused",
    "training",
)
OWN = ("lr", "momentum", "weight_decay", "decoupled_weight_decay", "precondition", "maximize")
FLAGS = (
    "bounded",
    "decoupled_weight_decay",
    "skip_nonfinite",
    "maximize",
    "foreach",
    "differentiable",
    "capturable",
    "fused",
    "training",
)
STATE_DTYPES = (None, torch.float64, torch.float32, torch.bfloat16, torch.float16)

# What an option is where it is not given: the paper's, and what was measured to serve under P
# (docs/preconditioning.md). The spectral P wants less momentum: it sums gradients before it, too.
PAPER: Mapping[str, Any] = {
    "warmup_epochs": 5,
    "reset_epochs": 10,
    "momentum": 0.9,
    "cubic": 1e-7,
    "repulsive": 1e-5,
    "decoupled_weight_decay": False,
}
PRECONDITIONED: Mapping[str, Any] = {
    "warmup_epochs": 0,
    "reset_epochs": 0,
    "momentum": 0.9,
    "cubic": 0.0,
    "repulsive": 0.0,
    "decoupled_weight_decay": True,
}
SPECTRAL: Mapping[str, Any] = {**PRECONDITIONED, "momentum": 0.6}

# Options of the optimizer as a whole; a group that names one of them is mistaken.
OPTIMIZER_ONLY = ("steps_per_epoch", "warmup_epochs", "reset_epochs")


def completed(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options with their defaults, which follow `precondition`, in the place of None."""
    usual = _usual(given["precondition"])
    return {**given, **{name: usual[name] for name in usual if given[name] is None}}


def _usual(precondition: Any) -> Mapping[str, Any]:
    if precondition is None:
        return PAPER
    name = getattr(precondition, "name", precondition)
    return SPECTRAL if isinstance(name, str) and name == "spectral" else PRECONDITIONED


def in_steps(given: Mapping[str, Any], steps_per_epoch: float | None) -> dict[str, Any]:
    """The options with counts of epochs turned into steps. A count in steps wins."""
    if steps_per_epoch is not None:
        require(
            is_number(steps_per_epoch) and 1 <= steps_per_epoch < 1e12,
            "steps_per_epoch",
            steps_per_epoch,
            "the number of optimizer steps in an epoch, at least 1",
        )
    result = dict(given)
    for kind in ("warmup", "reset"):
        epochs = result.pop(f"{kind}_epochs")
        good = is_number(epochs) and 0 <= epochs < 1e9
        require(good, f"{kind}_epochs", epochs, "a number of at least 0")
        if result[f"{kind}_steps"] is None:
            if epochs > 0 and steps_per_epoch is None:
                raise ValueError(
                    f"{kind}_steps is None and so is steps_per_epoch: pass "
                    f"steps_per_epoch=len(loader), which turns {kind}_epochs={epochs:g} into "
                    f"steps, or pass {kind}_steps"
                )
            steps = math.floor(epochs * (steps_per_epoch or 0) + 0.5)
            if kind == "reset" and epochs > 0:
                steps = max(1, steps)  # 0 would mean: never
            result[f"{kind}_steps"] = steps
    return result


def plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """The group with NumPy's numbers as Python's, which checkpoints can be loaded with."""
    return {key: _plain(value) for key, value in group.items()}


def check_parameters(entries: Sequence[Any], taken: set[str]) -> None:
    """Refuse parameters that stand twice, names that do, and memory that cannot be written."""
    seen: set[int] = set()
    names = set(taken)
    for index, entry in enumerate(entries):
        name, parameter = entry if isinstance(entry, tuple) else (None, entry)
        called = f"number {index}" if name is None else repr(name)
        if id(parameter) in seen:
            raise ValueError(f"params holds the same parameter twice: {called} stood before")
        seen.add(id(parameter))
        if name is not None and name in names:
            raise ValueError(f"params names two parameters {name!r}: names must differ")
        names.add(name)
        if isinstance(parameter, Tensor) and parameter.is_conj():
            raise ValueError(
                f"params holds a conjugate view, {called}, which has no memory of its own to "
                "update: pass resolve_conj() of it"
            )


def check_group(group: Mapping[str, Any]) -> None:
    """Refuse a group whose options are outside their ranges."""
    for name in OPTIMIZER_ONLY:
        if name in group:
            raise ValueError(
                f"{name}={group[name]!r} in a parameter group: the clock is one for the whole "
                f"optimizer, so pass {name} to Neumann itself"
            )
    check_moving(group)
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
    for name in FLAGS:
        value = group[name]
        good = isinstance(value, bool) or (value is None and name in ("foreach", "fused"))
        require(good, name, value, "True or False")
    state_dtype = group["state_dtype"]
    known = state_dtype in STATE_DTYPES
    require(known, "state_dtype", state_dtype, "None or a torch dtype of 16, 32 or 64-bit floats")
    check_preconditioner(group)
    check_implementation(group)


def check_preconditioner(group: Mapping[str, Any]) -> None:
    """Refuse what is no preconditioner; also made where one is chosen in mid-training."""
    precondition = group["precondition"]
    named = precondition is None or isinstance(precondition, str)
    good = precondition in (None, *NAMED) if named else is_preconditioner(precondition)
    if not good:
        wanted = f"None, one of {', '.join(map(repr, NAMED))} or a Preconditioner"
        why = "" if named else lacking(precondition)
        raise ValueError(f"precondition must be {wanted}, got {precondition!r}{why}")
    if not named:
        _check_name(precondition)
        _check_before(precondition)
    if precondition is not None and group["differentiable"]:
        raise ValueError(
            "differentiable=True records no preconditioner: leave precondition at None"
        )


def _check_name(precondition: Any) -> None:
    """Refuse a name by which a checkpoint would take it for one of ours."""
    ours = NAMED.get(precondition.name)
    if ours is not None and not isinstance(precondition, type(ours)):
        names = ", ".join(map(repr, NAMED))
        raise ValueError(
            f"the name of a preconditioner of your own must be none of {names}, got "
            f"{precondition.name!r} of {precondition!r}"
        )


def _check_before(precondition: Any) -> None:
    """Refuse what stands before a preconditioner and is none, or the preconditioner itself."""
    chain = [precondition]
    while (before := getattr(chain[-1], "before", None)) is not None:
        good = is_preconditioner(before) and not any(before is stage for stage in chain)
        wanted = "None or another Preconditioner"
        require(good, f"before of the preconditioner {chain[-1].name!r}", before, wanted)
        chain.append(before)


def check_moving(group: Mapping[str, Any]) -> None:
    """Refuse bad values of what schedulers move; cheap, and made before every step.

    A tensor on an accelerator is taken on trust: looking at it would make the host wait.
    """
    lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
    if isinstance(lr, Tensor):
        good = lr.numel() == 1 and (lr.device.type != "cpu" or 0 <= float(lr.detach()) < math.inf)
    else:
        good = is_number(lr) and lr >= 0
    require(good, "lr", lr, "a finite number, or a tensor of one, of at least 0")
    require(is_number(momentum) and 0 <= momentum < 1, "momentum", momentum, "in [0, 1)")
    require(is_number(decay) and decay >= 0, "weight_decay", decay, "a finite number of at least 0")


def check_implementation(group: Mapping[str, Any]) -> None:
    """Refuse flags that contradict each other."""
    if group["fused"] and (group["foreach"] or group["differentiable"]):
        other = "foreach" if group["foreach"] else "differentiable"
        raise ValueError(f"fused=True and {other}=True exclude each other: choose one")
    if group["capturable"] and (group["foreach"] is not None or group["differentiable"]):
        other = "differentiable" if group["differentiable"] else "foreach"
        raise ValueError(
            f"capturable=True is the fused CUDA kernel's, so leave {other} at its default"
        )
    if group["foreach"] and group["differentiable"]:
        raise ValueError(
            "foreach=True and differentiable=True exclude each other: the single-tensor form is "
            "the differentiable one"
        )


def check_agreement(groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse groups that differ in what must be one for all."""
    for index, group in enumerate(groups[1:], start=1):
        for name in SHARED:
            if group[name] != groups[0][name]:
                raise ValueError(
                    f"{name} must agree in all parameter groups: it is {groups[0][name]!r} in "
                    f"group 0 and {group[name]!r} in group {index}"
                )


def _plain(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value
