"""Optimizers for hidden matrices only, with AdamW for the rest of the network.

Each function gets the optimizer's constructor, the groups of `role_rates` and its options.
`rest_betas` are the momenta of AdamW.
"""

from collections.abc import Callable
from typing import Any

from torch.optim import AdamW, Optimizer

from neumann.lab.optimizers.joined_optimizer import JoinedOptimizer
from neumann.optim.roles import HIDDEN
from neumann.validation import is_count, is_number, require, require_positive

Groups = list[dict[str, Any]]
Constructor = Callable[..., Optimizer]
REST_BETAS = "rest_betas"
USUAL_BETAS = (0.9, 0.95)
BY_NORM = "norm"
MOST_STEPS = 99  # of Newton–Schulz, that torch takes


def join_muon(
    constructor: Constructor, groups: Groups, *, adjust_lr_fn: str | None = None, **options: Any
) -> Optimizer:
    """torch.optim.Muon and AdamW.

    `adjust_lr_fn` is torch's, or "norm": all steps change the outputs of a layer by the same
    amount, whatever its shape.
    """
    _check_choice("adjust_lr_fn", adjust_lr_fn, (None, "original", "match_rms_adamw", BY_NORM))
    _check_orthogonalization(**options)
    if adjust_lr_fn == BY_NORM:
        groups = [part for group in groups for part in _scale_by_norm(group)]
        adjust_lr_fn = "original"
    return join_adamw(constructor, groups, adjust_lr_fn=adjust_lr_fn, **options)


def join_adamw(
    constructor: Constructor,
    groups: Groups,
    *,
    lr: float,
    rest_betas: tuple[float, float] = USUAL_BETAS,
    **options: Any,
) -> Optimizer:
    """The optimizer for hidden matrices, and AdamW."""
    check_betas(REST_BETAS, rest_betas, USUAL_BETAS)
    hidden, rest = _split(groups)
    parts = [constructor(hidden, lr=lr, **options)]
    if rest:
        parts.append(AdamW(rest, lr=lr, betas=rest_betas, weight_decay=0.0))
    return JoinedOptimizer(parts)


def build_normuon(
    constructor: Constructor,
    groups: Groups,
    *,
    update_scale: str = "match_rms",
    rest_betas: tuple[float, float] = USUAL_BETAS,
    **options: Any,
) -> Optimizer:
    """NorMuon, which has an AdamW of its own.

    `update_scale` is the package's, or "norm", as `adjust_lr_fn` of `join_muon`.
    """
    check_betas(REST_BETAS, rest_betas, USUAL_BETAS)
    _check_choice("update_scale", update_scale, ("preserve_norm", "match_rms", BY_NORM))
    _check_orthogonalization(**options)
    if update_scale == BY_NORM:
        groups = [part for group in groups for part in _scale_by_norm(group)]
        update_scale = "preserve_norm"
    hidden, rest = _split(groups)
    marked = [
        *({**group, "use_muon": True} for group in hidden),
        *({**group, "use_muon": False, "betas": rest_betas} for group in rest),
    ]
    return constructor(marked, update_scale=update_scale, **options)


def _split(groups: Groups) -> tuple[Groups, Groups]:
    """The groups of hidden matrices, and the others."""
    hidden = [group for group in groups if group["role"] == HIDDEN]
    if not hidden:
        raise ValueError("the model has no hidden matrices: choose an optimizer such as adamw")
    return hidden, [group for group in groups if group["role"] != HIDDEN]


def check_betas(name: str, betas: Any, usual: tuple[float, ...]) -> None:
    """Refuse anything but numbers in [0, 1), as many as there usually are."""
    listed = isinstance(betas, list | tuple) and len(betas) == len(usual)
    good = listed and all(is_number(beta) and 0 <= beta < 1 for beta in betas)
    count = {2: "two", 3: "three"}.get(len(usual), len(usual))
    example = ",".join(map(str, usual))
    require(good, name, betas, f"{count} numbers in [0, 1), as in {name}=({example})")


def _check_choice(name: str, chosen: Any, choices: tuple[str | None, ...]) -> None:
    listed = " or ".join("none" if each is None else each for each in choices)
    require(chosen in choices, name, chosen, listed)


def _check_orthogonalization(
    *, momentum: Any = 0.0, ns_steps: Any = 1, eps: Any = 1.0, **others: Any
) -> None:
    """Refuse values that the constructor takes, but with which a step fails or is wrong."""
    require(is_number(momentum) and 0 <= momentum < 1, "momentum", momentum, "a number in [0, 1)")
    count = is_count(ns_steps) and 1 <= ns_steps <= MOST_STEPS
    require(count, "ns_steps", ns_steps, f"an integer from 1 to {MOST_STEPS}")
    require_positive("eps", eps)


def _scale_by_norm(group: dict[str, Any]) -> Groups:
    """Divide hidden matrices by shape. "original" and "preserve_norm" have √max(1, out/in)."""
    if group["role"] != HIDDEN:
        return [group]
    by_factor: dict[float, list[Any]] = {}
    for p in group["params"]:
        by_factor.setdefault(min(1.0, p.shape[0] / p.shape[1]) ** 0.5, []).append(p)
    return [
        {**group, "params": params, "lr": group["lr"] * factor}
        for factor, params in by_factor.items()
    ]
