"""The optimizers of the language benchmarks. All of them use the same roles."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from neumann import Neumann, param_groups
from neumann.optim.groups import RoleOptions
from neumann.optim.preconditioners import Diagonal, Momentum, Spectral


@dataclass(frozen=True)
class Setting:
    """An optimizer and what is tuned about it."""

    arm: str  # a name in ARMS
    lr: float
    decay: float = 0.1  # decoupled, of hidden matrices and the output layer
    before: float = 0.8  # momentum before orthogonalization
    momentum: float = 0.6  # μ of the series; β1 of AdamW
    embedding: float = 1.0  # learning rate of embeddings, as a multiple of lr
    output: float = 1.0  # of the output layer
    vector: float = 1.0  # of vectors
    cooling: float = 0.0  # μ falls with the learning rate, as its share of the peak to this power


def build_spectral(
    model: nn.Module, setting: Setting, scaling: str = "rms", also: Sequence[str] = ()
) -> Neumann:
    """Neumann: the spectral P for hidden matrices and the roles in `also`, diagonal elsewhere."""
    before = Momentum(setting.before)
    spectral: Any = Spectral(before=before)
    elementwise: Any = Diagonal(before=before)
    if scaling == "norm":  # the size that "rms" has at width 512
        spectral = Spectral(scale=0.2 * 512**0.5, before=before, scaling="norm")
    output = setting.output
    if scaling == "norm" and "output" not in also:  # outputs of any width change by the same amount
        output *= 512 / collect_roles(model)["output"][0].shape[1]
    chosen = {role: spectral if role in also else elementwise for role in ("embedding", "output")}
    options = {
        "hidden": RoleOptions(spectral, decay=True),
        "embedding": RoleOptions(chosen["embedding"], decay=False, scale=setting.embedding),
        "output": RoleOptions(chosen["output"], decay=True, scale=output),
        "vector": RoleOptions(elementwise, decay=False, scale=setting.vector),
    }
    groups = param_groups(model, options=options, weight_decay=setting.decay)
    return Neumann(groups, lr=setting.lr, momentum=setting.momentum)


def build_muon(model: nn.Module, setting: Setting, adjust_lr_fn: str = "match_rms_adamw") -> "Pair":
    """torch.optim.Muon for hidden matrices, AdamW for the rest."""
    muon: Any = getattr(torch.optim, "Muon", None)
    if muon is None:
        raise RuntimeError(f"torch {torch.__version__} has no Muon: it needs 2.9 or newer")
    roles = collect_roles(model)
    hidden = muon(
        roles["hidden"],
        lr=setting.lr,
        momentum=setting.before,
        weight_decay=setting.decay,
        adjust_lr_fn=adjust_lr_fn,
    )
    return Pair([hidden, _build_rest(roles, setting)])


def build_adamw(model: nn.Module, setting: Setting) -> AdamW:
    roles = collect_roles(model)
    groups: list[dict[str, Any]] = [
        {"params": roles["hidden"], "lr": setting.lr, "weight_decay": setting.decay},
        *_list_rest(roles, setting),
    ]
    return AdamW(groups, lr=setting.lr, betas=(setting.momentum, 0.95), weight_decay=0.0)


def collect_roles(model: nn.Module) -> dict[str, list[Tensor]]:
    """The parameters of each role."""
    found: dict[str, list[Tensor]] = {"hidden": [], "embedding": [], "output": [], "vector": []}
    for group in param_groups(model):
        found[group["role"]] += [parameter for _, parameter in group["params"]]
    return found


def _build_rest(roles: dict[str, list[Tensor]], setting: Setting) -> AdamW:
    return AdamW(_list_rest(roles, setting), lr=setting.lr, betas=(0.9, 0.95), weight_decay=0.0)


def _list_rest(roles: dict[str, list[Tensor]], setting: Setting) -> list[dict[str, Any]]:
    """Groups of everything but the hidden matrices, for AdamW."""
    scales = {"embedding": setting.embedding, "output": setting.output, "vector": setting.vector}
    return [
        {
            "params": roles[role],
            "lr": setting.lr * scale,
            "weight_decay": setting.decay if role == "output" else 0.0,
        }
        for role, scale in scales.items()
        if roles[role]
    ]


class Pair:
    """Several optimizers that step together."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


BOTH = ("embedding", "output")
ARMS: dict[str, Callable[[nn.Module, Setting], Any]] = {
    "spectral": build_spectral,
    "spectral embedding": partial(build_spectral, also=("embedding",)),
    "spectral output": partial(build_spectral, also=("output",)),
    "spectral everywhere": partial(build_spectral, also=BOTH),
    "spectral by norm": partial(build_spectral, scaling="norm"),
    "spectral everywhere by norm": partial(build_spectral, scaling="norm", also=BOTH),
    "muon": build_muon,
    "muon original": partial(build_muon, adjust_lr_fn="original"),
    "adamw": build_adamw,
}
