"""The defaults of the options of Neumann that depend on the preconditioner P.

The constructor turns what it was given into the defaults of all groups, with epochs as steps. A
group that has a P of its own gets that P's momentum and form of weight decay; warm-up, resets and
forces belong to the whole run.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from neumann.optim.option_checks import check_group
from neumann.optim.options import keeps_average, to_plain
from neumann.validation import is_number, require

# The paper's, and what measurements favor under P (docs/contests.md). A P with a momentum of
# its own before it, as the spectral one has, needs less after it.
_PAPER: Mapping[str, Any] = {
    "warmup_epochs": 5,
    "reset_epochs": 10,
    "momentum": 0.9,
    "cubic": 1e-7,
    "repulsive": 1e-5,
    "decoupled_weight_decay": False,
}
_PRECONDITIONED: Mapping[str, Any] = {
    **_PAPER,
    "warmup_epochs": 0,
    "reset_epochs": 0,
    "cubic": 0.0,
    "repulsive": 0.0,
    "decoupled_weight_decay": True,
}
_AFTER_MOMENTUM: Mapping[str, Any] = {**_PRECONDITIONED, "momentum": 0.6}

# Of these, what belongs to the whole run: there is one clock and one distance.
_OF_THE_RUN = ("warmup_epochs", "reset_epochs", "cubic", "repulsive")


def make_defaults(
    given: Mapping[str, Any], groups: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The defaults of all groups, from the arguments of the constructor.

    None becomes the default, which depends on `precondition`; epochs become steps. If the groups
    bring their own preconditioners, the defaults of warm-up, resets and forces follow these.
    """
    usual = dict(_usual_options(given["precondition"]))
    if given["precondition"] is None and groups:
        chosen = [group.get("precondition") for group in groups]
        if all(p is not None for p in chosen):
            usual |= {name: _PRECONDITIONED[name] for name in _OF_THE_RUN}
        elif any(p is not None for p in chosen):
            _refuse_mixture(find_explicit(given))
    completed = {**given, **{name: usual[name] for name in usual if given[name] is None}}
    defaults = to_plain(_epochs_to_steps(completed))
    defaults["training"] = True
    check_group(defaults)
    return defaults


def find_explicit(given: Mapping[str, Any]) -> frozenset[str]:
    """The options that were given, of those whose default depends on P."""
    explicit = {name for name in _PAPER if given[name] is not None}
    for kind in ("warmup", "reset"):
        if given[f"{kind}_steps"] is not None:
            explicit.add(f"{kind}_epochs")
    return frozenset(explicit)


def refuse_mixed_group(
    group: Mapping[str, Any], known: Sequence[Mapping[str, Any]], explicit: frozenset[str]
) -> None:
    """Raise if a group with P would join the paper's defaults without anyone having said so."""
    paper = any(other["precondition"] is None for other in known)
    forced = keeps_average(group) or group["warmup_steps"] or group["reset_steps"]
    if group["precondition"] is not None and paper and forced:
        _refuse_mixture(explicit)


def refuse_plain_group(
    given: Mapping[str, Any], merged: Mapping[str, Any], known: Sequence[Mapping[str, Any]]
) -> None:
    """Raise if a group would join groups with P, and get the paper's form because it names no P."""
    others = [other["precondition"] for other in known]
    if "precondition" not in given and merged["precondition"] is None and None not in others:
        raise ValueError(
            "the other groups have a preconditioner and this one names none: set its precondition "
            "(None is the paper's form), or take it from neumann.param_groups"
        )


def _refuse_mixture(explicit: frozenset[str]) -> None:
    """Raise if groups with and without P would share defaults that only suit the paper's form."""
    names = {"warmup_epochs": "warmup_steps", "reset_epochs": "reset_steps"}
    missing = [names.get(name, name) for name in _OF_THE_RUN if name not in explicit]
    if missing:
        raise ValueError(
            "groups with and without a preconditioner have no default in common for warm-up, "
            f"resets and forces: pass {', '.join(missing)} to Neumann (0 suits a preconditioner)"
        )


def add_usual_options(group: dict[str, Any], explicit: frozenset[str]) -> None:
    """Give a group that has its own P that P's defaults, where nothing was said."""
    if "precondition" in group:
        usual = _usual_options(group["precondition"])
        for name in ("momentum", "decoupled_weight_decay"):
            if name not in explicit:
                group.setdefault(name, usual[name])


def _usual_options(precondition: Any) -> Mapping[str, Any]:
    if precondition is None:
        return _PAPER
    name = getattr(precondition, "name", precondition)
    has_momentum = getattr(precondition, "before", None) is not None
    return _AFTER_MOMENTUM if has_momentum or name == "spectral" else _PRECONDITIONED


def _epochs_to_steps(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options with epochs turned into steps. A number of steps wins over epochs."""
    result = dict(given)
    steps_per_epoch = result.pop("steps_per_epoch")
    if steps_per_epoch is not None:
        require(
            is_number(steps_per_epoch) and 1 <= steps_per_epoch < 1e12,
            "steps_per_epoch",
            steps_per_epoch,
            "the number of optimizer steps in an epoch, at least 1",
        )
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
