"""The optimizers of the lab by name, with their usual learning rates and options.

To add an optimizer, add a line to `RECIPES`; if text needs another one by the same name, also to
`TEXT_RECIPES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module, metadata
from typing import Any

from torch.optim import Optimizer

from neumann.lab.errors import UsageError, missing_package
from neumann.lab.optimizers.matrix_arms import build_normuon, join_adamw, join_muon
from neumann.lab.optimizers.role_arms import ROLE_OPTIONS
from neumann.lab.optimizers.role_rates import RATE_OPTIONS
from neumann.optim.recipe import LR

DECAY_NORMS = "decay_norms"  # an option of most arms: weight decay acts on biases and norms too


@dataclass(frozen=True)
class Recipe:
    """Where an optimizer is imported from, and how it is usually run."""

    module: str
    attribute: str
    lr: float  # if neither the arm nor the command names one
    options: Mapping[str, Any] = field(default_factory=dict)
    decay_norms: bool = False  # whether weight decay acts on biases and normalization weights
    package: str | None = None  # that an extra installs
    since: str = "another version"  # the first version of the package that has it
    sharded: bool = True  # whether it supports weights sharded by FSDP2
    by_role: bool = False  # each parameter gets the P, decay and scale of its role
    fixed: tuple[str, ...] = ()  # options that an arm may not name, since they make it what it is
    inner_loop: bool = False  # a step evaluates its mini-batch several times
    differentiates_twice: bool = False  # which SyncBatchNorm and CUDA graphs do not allow
    about: str = ""  # for `--opt help`
    rates: bool = False  # whether an arm may name a learning rate for each role
    # builds the optimizer from groups by role, if the constructor takes only hidden matrices
    assemble: Callable[..., Optimizer] | None = None

    def load(self) -> Callable[..., Optimizer]:
        try:
            module = import_module(self.module)
        except ImportError as error:
            package = self.module.split(".")[0]
            raise missing_package(package, self.extra or "lab", self.attribute, error) from error
        found: Callable[..., Optimizer] | None = getattr(module, self.attribute, None)
        if found is None:
            package = self.module.split(".")[0]
            lacks = f"{package} {metadata.version(package)} has no {self.attribute}"
            raise UsageError(f"{lacks}: it needs {self.since} or newer")
        return found

    @property
    def extra(self) -> str | None:
        """The extra, which has the name of the package; metadata of packages has no underscores."""
        return None if self.package is None else self.package.replace("_", "-")

    @property
    def role_options(self) -> tuple[str, ...]:
        """The options that are about roles."""
        if self.by_role:
            return ROLE_OPTIONS
        return RATE_OPTIONS if self.rates or self.assemble is not None else ()


_MOMENTUM = {"momentum": 0.9, "nesterov": True}
_RMS = {"alpha": 0.9, "momentum": 0.9}
# Options without an effect on matrices, and those of the AdamW inside the package's NorMuon.
_SOAP_FIXED = ("merge_dims", "precondition_1d", "data_format", "maximize", "kwargs")
_NORMUON_FIXED = ("adamw_lr", "adamw_betas", "adamw_wd", "maximize", "kwargs")
_PACKAGE: dict[str, Any] = {"package": "pytorch_optimizer", "since": "4.1.0", "sharded": False}
_INNER_LOOP: dict[str, Any] = {"decay_norms": True, "sharded": False, "inner_loop": True}
RECIPES = {
    "neumann-spectral": Recipe(
        "neumann",
        "Neumann",
        LR,
        by_role=True,
        fixed=("precondition",),
        about="for large batches; weight_decay=auto is the recipe",
    ),
    "neumann": Recipe(
        "neumann",
        "Neumann",
        0.2,
        decay_norms=True,
        rates=True,
        about="the paper's form, Algorithm 2",
    ),
    "neumann-diagonal": Recipe(
        "neumann",
        "Neumann",
        2.5e-3,
        {"precondition": "diagonal"},
        fixed=("precondition",),
        rates=True,
        about="scales each weight, as Adam does",
    ),
    "sgd": Recipe(
        "torch.optim", "SGD", 0.2, _MOMENTUM, decay_norms=True, about="Nesterov momentum 0.9"
    ),
    "rmsprop": Recipe("torch.optim", "RMSprop", 1e-3, _RMS, about="torch's, with momentum"),
    "rmsproptf": Recipe(
        "timm.optim",
        "RMSpropTF",
        0.01,
        {**_RMS, "eps": 1.0},
        package="timm",
        about="as TensorFlow defines it",
    ),
    "adam": Recipe("torch.optim", "Adam", 1e-3, about="weight decay added to the gradient"),
    "adamw": Recipe("torch.optim", "AdamW", 2e-3, rates=True, about="decoupled weight decay"),
    "nadam": Recipe("torch.optim", "NAdam", 1e-3, about="Adam with Nesterov momentum"),
    "nadamw": Recipe(
        "torch.optim",
        "NAdam",
        2e-3,
        {"decoupled_weight_decay": True},
        about="AdamW with Nesterov momentum",
    ),
    "lars": Recipe(
        "timm.optim",
        "Lars",
        1.0,
        _MOMENTUM,
        package="timm",
        about="SGD with a step size for each layer",
    ),
    "lamb": Recipe(
        "timm.optim",
        "Lamb",
        5e-3,
        package="timm",
        about="Adam with a step size for each layer",
    ),
    "muon": Recipe(
        "timm.optim.muon",
        "Muon",
        0.02,
        {"nesterov": True},
        package="timm",
        sharded=False,
        about="orthogonalizes matrices; AdamW for the rest",
    ),
    "normuon": Recipe(
        "pytorch_optimizer",
        "NorMuon",
        0.02,
        assemble=build_normuon,
        fixed=(*_NORMUON_FIXED, DECAY_NORMS),
        about="Muon, scaled row by row",
        **_PACKAGE,
    ),
    "soap": Recipe(
        "pytorch_optimizer",
        "SOAP",
        3e-3,
        assemble=join_adamw,
        fixed=(*_SOAP_FIXED, DECAY_NORMS),
        about="Adam in the eigenbasis of Shampoo",
        **_PACKAGE,
    ),
    "schedulefree": Recipe(
        "schedulefree",
        "AdamWScheduleFree",
        2e-3,
        package="schedulefree",
        rates=True,
        about="AdamW with averages; use sched=constant",
    ),
    "idealized": Recipe(
        "neumann",
        "IdealizedNeumann",
        0.1,
        fixed=("outer_lr",),
        about="the paper's Algorithm 1: several gradients a step",
        **_INNER_LOOP,
    ),
    "cg": Recipe(
        "neumann.lab.optimizers.newton_cg",
        "TruncatedNewton",
        0.3,
        fixed=(DECAY_NORMS,),
        about="Newton's method with conjugate gradients",
        differentiates_twice=True,
        **_INNER_LOOP,
    ),
}
# On text. Sweeps choose their range before they know the data, so lr is the same as above.
TEXT_RECIPES = {
    "muon": Recipe(
        "torch.optim",
        "Muon",
        0.02,
        {"adjust_lr_fn": "match_rms_adamw"},
        since="2.9",
        assemble=join_muon,
        sharded=False,
        fixed=(DECAY_NORMS,),
    ),
}
# Neumann with one P for all parameters, by the name of P; others are treated as "spectral". Weight
# decay spares biases and norms, as for AdamW.
PRECONDITIONED = {
    "diagonal": Recipe("neumann", "Neumann", 2.5e-3, rates=True),
    "spectral": Recipe("neumann", "Neumann", 0.015, rates=True),
}
