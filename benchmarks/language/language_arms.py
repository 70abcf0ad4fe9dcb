"""The optimizers of the language benchmarks. All of them use the same roles.

Muon, SOAP and NorMuon are those of the lab. SOAP and NorMuon need pytorch_optimizer, and
schedule-free AdamW needs schedulefree.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from neumann import Neumann, param_groups
from neumann.lab.models.gpt import ModernGPT, Size
from neumann.lab.optimizers.arm_recipes import RECIPES
from neumann.lab.optimizers.arms import Arm, build_optimizer
from neumann.lab.optimizers.role_rates import collect_roles, group_by_rate
from neumann.optim.groups import DEFAULTS, ParamGroups, RoleOptions
from neumann.optim.lr_rules import lr_factor
from neumann.optim.preconditioners import Diagonal, Momentum, Preconditioner, Spectral
from neumann.optim.recipe import FORGETTING, LR

RAMP = 0.03  # of the steps
BOTH = ("embedding", "output")


@dataclass(frozen=True)
class Setting:
    """An optimizer and what is tuned about it."""

    arm: str  # a name in ARMS
    lr: float
    decay: float = 0.1  # decoupled, of hidden matrices and the output layer
    before: float = 0.8  # momentum before orthogonalization
    momentum: float = 0.6  # μ of the series; β1 of AdamW
    embedding: float = 1.0  # learning rate of embeddings, as a multiple of lr; of the recipe: scale
    output: float = 1.0  # of the output layer
    vector: float = 1.0  # of vectors
    output_before: float | None = None  # of the recipe's output layer, if it has its own
    power: float = 1.0  # of the cooldown: after the ramp the learning rate falls as (1 − t)^power
    cooling: float = 0.0  # μ falls with the learning rate, as its share of the peak to this power
    slow: float = 0.0  # share of slow momentum before P, of the recipe and Muon
    lead: str = ""  # a name in language_variants.VARIANTS; "" is the arm as it is
    strength: float = 0.0  # of the lead
    state: str = "float32"  # dtype of the recipe's state
    eps: float = 1e-8  # ε of the recipe's diagonal P


def build_spectral(
    model: nn.Module, setting: Setting, scaling: str = "rms", also: Sequence[str] = ()
) -> Neumann:
    """Neumann: the spectral P for hidden matrices and the roles in `also`, diagonal elsewhere."""
    before = Momentum(setting.before)
    spectral: Any = Spectral(before=before)
    elementwise: Any = Diagonal(before=before)
    if scaling == "norm":  # the size that "rms" has at width 512
        spectral = Spectral(scale=0.2 * 512**0.5, before=before, scaling="norm")
    if scaling == "norm" and "output" not in also:  # outputs of any width change by the same amount
        inputs = collect_roles(model)["output"][0].shape[1]
        setting = replace(setting, output=setting.output * 512 / inputs)
    chosen = {role: spectral if role in also else elementwise for role in BOTH}
    return _build_by_role(model, setting, elementwise, hidden=spectral, **chosen)


def _build_by_role(
    model: nn.Module, setting: Setting, usual: Preconditioner, **chosen: Preconditioner
) -> Neumann:
    """Neumann with the P in `chosen` for some roles and the usual one for the others."""
    scales = {"hidden": 1.0, "embedding": setting.embedding, "output": setting.output}
    scales["vector"] = setting.vector
    options = {
        role: RoleOptions(chosen.get(role, usual), decay=role in ("hidden", "output"), scale=scale)
        for role, scale in scales.items()
    }
    groups = param_groups(model, options=options, weight_decay=setting.decay)
    return Neumann(groups, lr=setting.lr, momentum=setting.momentum)


def make_recipe(lr: float, decay: float) -> Setting:
    """What the recipe does today. Its scales are spelled out: other versions may have others."""
    output = DEFAULTS["output"].vocabulary or DEFAULTS["output"]  # of a layer over a vocabulary
    embedding, vector = (DEFAULTS[role].scale for role in ("embedding", "vector"))
    return Setting("recipe", lr, decay, embedding=embedding, output=output.scale, vector=vector)


def make_default_recipe(steps: int) -> Setting:
    """The recipe with its default learning rate and the decay that it chooses for a run."""
    return make_recipe(LR, decay=FORGETTING / (LR * steps))


def build_recipe(
    model: nn.Module,
    setting: Setting,
    change_hidden: Callable[[Any], Preconditioner] = lambda p: p,
    change_groups: Callable[[ParamGroups], None] = lambda groups: None,
) -> Neumann:
    """The groups of `neumann.param_groups`, with the scales of the setting.

    `change_hidden` may put another P in place of that of the hidden matrices, and `change_groups`
    may change anything.
    """
    options = {}
    for role, usual in DEFAULTS.items():
        # One scale for each role: of an output layer over tokens, and of an embedding as it is.
        chosen = usual.vocabulary or usual if role == "output" else replace(usual, vocabulary=None)
        before = setting.before
        if role == "output" and setting.output_before is not None:
            before = setting.output_before
        p: Any = replace(cast(Any, chosen.precondition), before=Momentum(before))
        p = replace(p, eps=setting.eps) if isinstance(p, Diagonal) else p
        scale = getattr(setting, role, chosen.scale)
        p = change_hidden(p) if role == "hidden" else p
        options[role] = replace(chosen, precondition=p, scale=scale)
    groups = param_groups(model, options=options, weight_decay=setting.decay)
    change_groups(groups)
    dtype = getattr(torch, setting.state)
    return Neumann(groups, lr=setting.lr, momentum=setting.momentum, state_dtype=dtype)


def build_one_for_all(model: nn.Module, setting: Setting) -> Neumann:
    """The spectral P for every matrix, at one learning rate."""
    return Neumann(
        model.named_parameters(),
        lr=setting.lr,
        momentum=setting.momentum,
        weight_decay=setting.decay,
        precondition=Spectral(before=Momentum(setting.before)),
    )


def build_diagonal(model: nn.Module, setting: Setting) -> Neumann:
    """Neumann with the diagonal P for everything; the paper's momentum, no momentum before P."""
    return _build_by_role(model, setting, Diagonal(scale=1.0))


def build_paper(model: nn.Module, setting: Setting, steps: int) -> Neumann:
    """The paper's form; warm-up and first interval are shares of the run, not epochs."""
    return Neumann(
        _group_by_rate(model, setting),
        lr=setting.lr,
        momentum=setting.momentum,
        warmup_steps=round(0.05 * steps),
        reset_steps=max(2, round(0.1 * steps)),
    )


def build_muon(model: nn.Module, setting: Setting, scaling: str = "match_rms_adamw") -> Optimizer:
    """torch.optim.Muon for hidden matrices, AdamW for the rest."""
    options = {"momentum": setting.before, "adjust_lr_fn": scaling}
    return _build_in_lab("muon", model, setting, **options)


def build_normuon(model: nn.Module, setting: Setting, scaling: str = "match_rms") -> Optimizer:
    """NorMuon for hidden matrices, its AdamW for the rest."""
    options = {"momentum": setting.before, "update_scale": scaling}
    return _build_in_lab("normuon", model, setting, **options)


def build_soap(model: nn.Module, setting: Setting) -> Optimizer:
    """SOAP for hidden matrices, AdamW for the rest."""
    return _build_in_lab("soap", model, setting, betas=(setting.momentum, 0.95))


def _build_in_lab(name: str, model: nn.Module, setting: Setting, **options: Any) -> Optimizer:
    """An arm of the lab on text; UsageError if its package is missing or too old."""
    given = {"lr": setting.lr, "weight_decay": setting.decay, **_get_rates(setting), **options}
    arm = Arm(name, tuple(given.items())).on("text:")
    return build_optimizer(arm, model, steps_per_epoch=1)


def build_schedulefree(model: nn.Module, setting: Setting, steps: int) -> Any:
    """Schedule-free AdamW, with its own ramp; its learning rate stays constant after that."""
    optimizer: Any = RECIPES["schedulefree"].load()(
        _group_by_rate(model, setting),
        lr=setting.lr,
        betas=(setting.momentum, 0.95),
        warmup_steps=max(1, round(RAMP * steps)),
    )
    optimizer.train()
    return optimizer


def build_adamw(model: nn.Module, setting: Setting) -> AdamW:
    betas = (setting.momentum, 0.95)
    return AdamW(_group_by_rate(model, setting), lr=setting.lr, betas=betas, weight_decay=0.0)


def _group_by_rate(model: nn.Module, setting: Setting) -> list[dict[str, Any]]:
    return group_by_rate(model, setting.lr, setting.decay, _get_rates(setting))


def _get_rates(setting: Setting) -> dict[str, float]:
    return {role: getattr(setting, role) for role in ("embedding", "output", "vector")}


CONSTANT = ("schedule-free",)  # arms without a schedule from outside
_BY_STEPS: dict[str, Callable[[nn.Module, Setting, int], Any]] = {
    "paper": build_paper,
    "schedule-free": build_schedulefree,
}
_BUILDERS: dict[str, Callable[[nn.Module, Setting], Any]] = {
    "recipe": build_recipe,
    "one for all": build_one_for_all,
    "spectral": build_spectral,
    "spectral embedding": partial(build_spectral, also=("embedding",)),
    "spectral output": partial(build_spectral, also=("output",)),
    "spectral everywhere": partial(build_spectral, also=BOTH),
    "spectral by norm": partial(build_spectral, scaling="norm"),
    "spectral everywhere by norm": partial(build_spectral, scaling="norm", also=BOTH),
    "diagonal": build_diagonal,
    "muon": build_muon,
    "muon original": partial(build_muon, scaling="original"),
    "muon by norm": partial(build_muon, scaling="norm"),
    "normuon": build_normuon,
    "normuon by norm": partial(build_normuon, scaling="norm"),
    "soap": build_soap,
    "adamw": build_adamw,
}
ARMS = (*_BUILDERS, *_BY_STEPS)
TINY = Size(width=8, depth=1, heads=1)


def find_lr_factor(step: int, steps: int, power: float = 1.0) -> float:
    """The share of the peak learning rate in a step: a ramp, then a cooldown to zero."""
    return lr_factor(
        "power",
        step,
        power=power,
        total_steps=steps,
        ramp_steps=max(1, round(RAMP * steps)),
        steps_per_epoch=steps,
    )


def build_arm(model: nn.Module, setting: Setting, steps: int) -> Any:
    """The optimizer of a run of so many steps."""
    if setting.arm in _BY_STEPS:
        return _BY_STEPS[setting.arm](model, setting, steps)
    return _BUILDERS[setting.arm](model, setting)


def check_arms(arms: Iterable[str]) -> None:
    """Raise a UsageError if an arm's package is missing or too old, before anything is trained."""
    for arm in arms:
        build_arm(ModernGPT(8, 8, TINY), Setting(arm, lr=0.001), steps=100)
