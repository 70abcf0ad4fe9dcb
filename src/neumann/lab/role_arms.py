"""Options of arms that group parameters by role: `neumann-spectral:output=2,before=0.6`.

`hidden`, `embedding`, `output` and `vector` multiply the learning rate of a role, `before` is the
momentum before P.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from neumann.optim.groups import DEFAULTS, ParamGroups, RoleOptions, param_groups
from neumann.optim.preconditioners import Momentum
from neumann.optim.roles import ROLES

BEFORE = "before"
ROLE_OPTIONS = (*ROLES, BEFORE)


def group_by_role(model: nn.Module, weight_decay: float, options: Mapping[str, Any]) -> ParamGroups:
    """The groups of a model, with the options that an arm has named."""
    chosen: dict[str, RoleOptions] = {}
    for role, usual in DEFAULTS.items():
        p: Any = usual.precondition
        if BEFORE in options:
            p = replace(p, before=Momentum(options[BEFORE]))
        factor = options.get(role, 1)
        chosen[role] = replace(usual, precondition=p)
        if factor != 1:
            chosen[role] = replace(chosen[role], scale=_multiply(role, usual.scale, factor))
    return param_groups(model, options=chosen, weight_decay=weight_decay)


def _multiply(role: str, scale: float, factor: Any) -> float:
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        raise ValueError(f"{role} must be a number, got {factor!r}")
    return scale * factor
