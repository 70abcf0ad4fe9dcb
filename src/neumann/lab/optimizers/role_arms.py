"""Options of arms that group parameters by role: `neumann-spectral:output=2,before=0.6`.

`hidden`, `embedding`, `output` and `vector` multiply the learning rate of a role, `output_p` names
the P of the output layer (spectral or diagonal), `before` is the momentum before P, and
`slow_momentum` the share of slow momentum in it. `rest_lr`, which other arms have, is refused.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from torch import nn

from neumann.lab.optimizers.role_rates import REST_LR
from neumann.optim.groups import ParamGroups, RoleOptions, default_options, param_groups
from neumann.optim.recipe import add_slow_momentum
from neumann.optim.roles import EMBEDDING, OUTPUT, ROLES, VECTOR
from neumann.validation import is_number, require, require_positive

BEFORE = "before"
OUTPUT_P = "output_p"
SLOW = "slow_momentum"
ROLE_OPTIONS = (*ROLES, OUTPUT_P, BEFORE, SLOW, REST_LR)  # the last for its error alone


def group_by_role(
    model: nn.Module,
    weight_decay: float,
    options: Mapping[str, Any],
    decay_norms: bool = False,
    steps: int | None = None,
) -> ParamGroups:
    """The groups of a model, with the options that an arm has named.

    `steps` is the length of the run, which slow momentum depends on.
    """
    if REST_LR in options:
        instead = f"{EMBEDDING}, {OUTPUT} and {VECTOR}, as in {OUTPUT}=2"
        raise ValueError(f"it has no {REST_LR}, but multiples of lr for roles: {instead}")
    chosen: dict[str, RoleOptions] = {}
    for role, usual in default_options(model).items():
        given = replace(usual, decay=True) if role == VECTOR and decay_norms else usual
        if role == OUTPUT and OUTPUT_P in options:
            given = _choose_output(usual, options[OUTPUT_P])
        if BEFORE in options:
            before = options[BEFORE]
            require(is_number(before) and 0 <= before < 1, BEFORE, before, "in [0, 1)")
            given = given.with_momentum(before)
        factor = options.get(role, 1.0)
        require_positive(role, factor)
        chosen[role] = given.scaled_by(factor)
    groups = param_groups(model, options=chosen, weight_decay=weight_decay)
    if options.get(SLOW):
        require(steps is not None, "steps", steps, f"known for {SLOW}")
        add_slow_momentum(groups, cast(int, steps), options[SLOW])
    return groups


def _choose_output(usual: RoleOptions, name: Any) -> RoleOptions:
    """One P for output layers of every shape."""
    known = {"spectral": replace(usual, vocabulary=None), "diagonal": usual.vocabulary or usual}
    require(name in known, OUTPUT_P, name, "'spectral' or 'diagonal'")
    return known[name]
