"""Options of arms that group parameters by role: `neumann-spectral:output=2,before=0.6`.

`hidden`, `embedding`, `output` and `vector` multiply the learning rate of a role, `output_p` names
the P of the output layer (spectral or diagonal), `before` is the momentum before P. For hidden
matrices alone, `slow` is the weight of a slow sum of gradients beside that momentum, and
`even_rows` divides rows by their norms before they are orthogonalized.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from neumann.optim.groups import ParamGroups, RoleOptions, default_options, param_groups
from neumann.optim.preconditioners import TwoMomenta
from neumann.optim.roles import HIDDEN, OUTPUT, ROLES, VECTOR
from neumann.validation import is_number, require, require_positive

BEFORE = "before"
OUTPUT_P = "output_p"
SLOW = "slow"
EVEN_ROWS = "even_rows"
ROLE_OPTIONS = (*ROLES, OUTPUT_P, BEFORE, SLOW, EVEN_ROWS)


def group_by_role(
    model: nn.Module, weight_decay: float, options: Mapping[str, Any], decay_norms: bool = False
) -> ParamGroups:
    """The groups of a model, with the options that an arm has named."""
    chosen: dict[str, RoleOptions] = {}
    for role, usual in default_options(model).items():
        given = replace(usual, decay=True) if role == VECTOR and decay_norms else usual
        if role == OUTPUT and OUTPUT_P in options:
            given = _choose_output(usual, options[OUTPUT_P])
        if BEFORE in options:
            before = options[BEFORE]
            require(is_number(before) and 0 <= before < 1, BEFORE, before, "in [0, 1)")
            given = given.with_momentum(before)
        if role == HIDDEN:
            given = _change_hidden(given, options)
        factor = options.get(role, 1.0)
        require_positive(role, factor)
        chosen[role] = given.scaled_by(factor)
    return param_groups(model, options=chosen, weight_decay=weight_decay)


def _change_hidden(usual: RoleOptions, options: Mapping[str, Any]) -> RoleOptions:
    """The P of hidden matrices, with a slow sum or even rows if an arm names them."""
    p: Any = usual.precondition
    if EVEN_ROWS in options:
        p = replace(p, even_rows=options[EVEN_ROWS])
    weight = options.get(SLOW, 0.0)
    require(is_number(weight) and weight >= 0, SLOW, weight, "a number of at least 0")
    if weight:
        p = replace(p, before=TwoMomenta(p.before.decay, weight=weight))
    return replace(usual, precondition=p)


def _choose_output(usual: RoleOptions, name: Any) -> RoleOptions:
    """One P for output layers of every shape."""
    known = {"spectral": replace(usual, vocabulary=None), "diagonal": usual.vocabulary or usual}
    require(name in known, OUTPUT_P, name, "'spectral' or 'diagonal'")
    return known[name]
