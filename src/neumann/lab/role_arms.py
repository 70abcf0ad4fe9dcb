"""Options of arms that group parameters by role: `neumann-spectral:output=2,before=0.6`.

`hidden`, `embedding`, `output` and `vector` multiply the learning rate of a role, `output_p` names
the P of the output layer (spectral or diagonal), `before` is the momentum before P.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from neumann.optim.groups import DEFAULTS, ParamGroups, RoleOptions, param_groups
from neumann.optim.preconditioners import Momentum
from neumann.optim.roles import HIDDEN, OUTPUT, ROLES, VECTOR
from neumann.validation import is_number, require, require_positive

BEFORE = "before"
OUTPUT_P = "output_p"
ROLE_OPTIONS = (*ROLES, OUTPUT_P, BEFORE)


def group_by_role(model: nn.Module, weight_decay: float, options: Mapping[str, Any]) -> ParamGroups:
    """The groups of a model, with the options that an arm has named."""
    chosen: dict[str, RoleOptions] = {}
    for role, usual in DEFAULTS.items():
        if role == OUTPUT and OUTPUT_P in options:
            usual = _with_p(usual, options[OUTPUT_P])
        p: Any = usual.precondition
        if BEFORE in options:
            before = options[BEFORE]
            require(is_number(before) and 0 <= before < 1, BEFORE, before, "in [0, 1)")
            p = replace(p, before=Momentum(before))
        factor = options.get(role, 1.0)
        require_positive(role, factor)
        chosen[role] = replace(usual, precondition=p, scale=usual.scale * factor)
    return param_groups(model, options=chosen, weight_decay=weight_decay)


def _with_p(usual: RoleOptions, name: Any) -> RoleOptions:
    """An output layer with a P by name. The spectral one takes the steps of a hidden matrix."""
    chosen = {"spectral": HIDDEN, "diagonal": VECTOR}
    require(name in chosen, OUTPUT_P, name, "'spectral' or 'diagonal'")
    p = DEFAULTS[chosen[name]].precondition
    spectral = name == "spectral"
    return replace(
        usual,
        precondition=p,
        scale=1.0 if spectral else usual.scale,
        per_input=not spectral,
    )
