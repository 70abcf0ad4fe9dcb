"""What the callbacks need to know of an optimizer that a trainer hands them."""

from typing import Any

from torch import Tensor

from neumann.optim import Neumann
from neumann.optim.checkpoint import WEIGHTS
from neumann.optim.guard import neumann_inside

__all__ = ["evaluation_weights", "in_evaluation_mode", "neumann_inside"]


def evaluation_weights(optimizer: Neumann) -> list[tuple[Tensor, Tensor]]:
    """Each parameter that has state, and a copy of its evaluation weights; nothing is switched."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = optimizer.eval_params()
    weights = found.values() if isinstance(found, dict) else found
    return [
        (p, shown)
        for p, shown in zip(parameters, weights, strict=True)
        if p in optimizer.state  # a frozen parameter has one set of weights
    ]


def in_evaluation_mode(optimizer: Neumann, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict, written in training mode, as evaluation mode would have written it.

    It goes with a model that holds the evaluation weights, and resumes as exactly.
    """
    state = dict(state_dict["state"])
    groups = []
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        groups.append({**saved, "training": False})
        for p, key in zip(group["params"], saved["params"], strict=True):
            if key in state:
                state[key] = {**state[key], WEIGHTS: p.detach()}
    return {**state_dict, "state": state, "param_groups": groups}
