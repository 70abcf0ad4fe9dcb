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
from neumann.validation import is_number, require, require_positive

BEFORE = "before"
ROLE_OPTIONS = (*ROLES, BEFORE)


def group_by_role(model: nn.Module, weight_decay: float, options: Mapping[str, Any]) -> ParamGroups:
    """The groups of a model, with the options that an arm has named."""
    chosen: dict[str, RoleOptions] = {}
    for role, usual in DEFAULTS.items():
        p: Any = usual.precondition
        if BEFORE in options:
            before = options[BEFORE]
            require(is_number(before) and 0 <= before < 1, BEFORE, before, "in [0, 1)")
            p = replace(p, before=Momentum(before))
        factor = options.get(role, 1.0)
        require_positive(role, factor)
        chosen[role] = replace(usual, precondition=p, scale=usual.scale * factor)
    return param_groups(model, options=chosen, weight_decay=weight_decay)
