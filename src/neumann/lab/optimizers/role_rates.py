"""A learning rate for each role: `adamw:lr=1e-3,embedding=16,output=8`, `soap:rest_lr=0.01`.

`embedding`, `output` and `vector` multiply the learning rate of a role. `rest_lr` is what they
multiply; without it, that is `lr`. Hidden matrices have `lr` itself. Weight decay acts on hidden
matrices and the output layer. Roles are those of `neumann.param_groups`.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from neumann.optim.groups import param_groups
from neumann.optim.roles import EMBEDDING, HIDDEN, OUTPUT, ROLES, VECTOR
from neumann.validation import require_positive

REST_LR = "rest_lr"
RATE_OPTIONS = (EMBEDDING, OUTPUT, VECTOR, REST_LR)
_DECAYING = (HIDDEN, OUTPUT)


def group_by_rate(
    model: nn.Module, lr: float, weight_decay: float, options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """One group for each role that the model has, with the rates that an arm has named."""
    for name, value in options.items():
        require_positive(name, value)
    rest_lr = options.get(REST_LR, lr)
    return [
        {
            "params": parameters,
            "role": role,
            "lr": lr if role == HIDDEN else rest_lr * options.get(role, 1.0),
            "weight_decay": weight_decay if role in _DECAYING else 0.0,
        }
        for role, parameters in collect_roles(model).items()
        if parameters
    ]


def collect_roles(model: nn.Module) -> dict[str, list[Tensor]]:
    """The parameters of each role."""
    found: dict[str, list[Tensor]] = {role: [] for role in ROLES}
    for group in param_groups(model):
        found[group["role"]] += [parameter for _, parameter in group["params"]]
    return found
