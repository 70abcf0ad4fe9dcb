"""The arms of a comparison: an optimizer with options, written as `neumann:lr=0.2,momentum=0.8`.

To add an optimizer, add a line to `RECIPES`; if text needs another one by the same name, also to
`TEXT_RECIPES`. `arm_summaries` can say what it is. An arm may name any option of the constructor,
which overrides the recipe's; an unknown one is a UsageError that suggests the nearest names.
"""

import ast
import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module, metadata
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from neumann.lab.data.dataset import is_text
from neumann.lab.errors import UsageError, missing_package, require, shorten, unknown
from neumann.lab.lengths import (
    list_length_options,
    parse_length_options,
    resolve_length_options,
)
from neumann.lab.optimizers.matrix_arms import REST_BETAS, build_normuon, join_adamw, join_muon
from neumann.lab.optimizers.role_arms import ROLE_OPTIONS, group_by_role
from neumann.lab.optimizers.role_rates import RATE_OPTIONS, group_by_rate
from neumann.lab.user_code import call_user_function
from neumann.optim.recipe import AUTO, LR, choose_weight_decay

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
WORDS = {"true": True, "false": False, "none": None}
DECAY_NORMS = "decay_norms"  # an option of every arm: weight decay acts on biases and norms too


@dataclass(frozen=True)
class Recipe:
    """Where an optimizer is imported from, and how it is usually run."""

    module: str
    attribute: str
    lr: float  # if neither the arm nor the command names one
    options: Mapping[str, Any] = field(default_factory=dict)
    decay_norms: bool = False  # whether weight decay acts on biases and normalization weights
    extra: str | None = None  # the extra that installs it; it has the name of the package
    since: str = "another version"  # the first version of the package that has it
    sharded: bool = True  # whether it supports weights sharded by FSDP2
    by_role: bool = False  # each parameter gets the P, decay and scale of its role
    fixed: tuple[str, ...] = ()  # options that an arm may not name, since they make it what it is
    inner_loop: bool = False  # a step evaluates its mini-batch several times
    rates: bool = False  # an arm may name a learning rate for each role, which groups by role
    # makes the optimizer of groups by role, of a constructor that takes only hidden matrices
    assemble: Callable[..., Optimizer] | None = None

    def load(self) -> Callable[..., Optimizer]:
        try:
            module = import_module(self.module)
        except ImportError as error:
            package = self.module.split(".")[0]
            raise missing_package(package, self.extra or "lab", self.attribute) from error
        found: Callable[..., Optimizer] | None = getattr(module, self.attribute, None)
        if found is None:
            package = self.module.split(".")[0]
            lacks = f"{package} {metadata.version(package)} has no {self.attribute}"
            raise UsageError(f"{lacks}: it needs {self.since} or newer")
        return found

    @property
    def role_options(self) -> tuple[str, ...]:
        """The options that are about roles."""
        if self.by_role:
            return ROLE_OPTIONS
        return RATE_OPTIONS if self.rates or self.assemble is not None else ()


_MOMENTUM = {"momentum": 0.9, "nesterov": True}
_RMS = {"alpha": 0.9, "momentum": 0.9}
# What makes no difference to matrices of two dimensions, or is another optimizer.
_SOAP_FIXED = ("merge_dims", "precondition_1d", "data_format", "maximize", "kwargs")
_NORMUON_FIXED = ("adamw_lr", "adamw_betas", "adamw_wd", "maximize", "kwargs")
_PACKAGE: dict[str, Any] = {"extra": "pytorch_optimizer", "since": "4.1.0", "sharded": False}
_INNER_LOOP: dict[str, Any] = {"decay_norms": True, "sharded": False, "inner_loop": True}
RECIPES = {
    "neumann": Recipe("neumann", "Neumann", 0.2, decay_norms=True, rates=True),
    "neumann-spectral": Recipe("neumann", "Neumann", LR, by_role=True, fixed=("precondition",)),
    "neumann-diagonal": Recipe(
        "neumann",
        "Neumann",
        2.5e-3,
        {"precondition": "diagonal"},
        fixed=("precondition",),
        rates=True,
    ),
    "sgd": Recipe("torch.optim", "SGD", 0.2, _MOMENTUM, decay_norms=True),
    "rmsprop": Recipe("torch.optim", "RMSprop", 1e-3, _RMS),
    "rmsproptf": Recipe("timm.optim", "RMSpropTF", 0.01, {**_RMS, "eps": 1.0}, extra="timm"),
    "adam": Recipe("torch.optim", "Adam", 1e-3),
    "adamw": Recipe("torch.optim", "AdamW", 2e-3, rates=True),
    "nadam": Recipe("torch.optim", "NAdam", 1e-3),
    "nadamw": Recipe("torch.optim", "NAdam", 2e-3, {"decoupled_weight_decay": True}),
    "lars": Recipe("timm.optim", "Lars", 1.0, _MOMENTUM, extra="timm"),
    "lamb": Recipe("timm.optim", "Lamb", 5e-3, extra="timm"),
    "muon": Recipe(
        "timm.optim.muon", "Muon", 0.02, {"nesterov": True}, extra="timm", sharded=False
    ),
    "normuon": Recipe(
        "pytorch_optimizer",
        "NorMuon",
        0.02,
        {"update_scale": "match_rms"},
        assemble=build_normuon,
        fixed=(*_NORMUON_FIXED, DECAY_NORMS),
        **_PACKAGE,
    ),
    "soap": Recipe(
        "pytorch_optimizer",
        "SOAP",
        3e-3,
        assemble=join_adamw,
        fixed=(*_SOAP_FIXED, DECAY_NORMS),
        **_PACKAGE,
    ),
    "schedulefree": Recipe(
        "schedulefree", "AdamWScheduleFree", 2e-3, extra="schedulefree", rates=True
    ),
    "idealized": Recipe("neumann", "IdealizedNeumann", 0.1, fixed=("outer_lr",), **_INNER_LOOP),
    "cg": Recipe(
        "neumann.lab.optimizers.newton_cg",
        "TruncatedNewton",
        0.3,
        fixed=(DECAY_NORMS,),
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
# decay spares biases and norms, as for AdamW. 0.03 is where the contest's search for lr started.
PRECONDITIONED = {
    "diagonal": Recipe("neumann", "Neumann", 2.5e-3, rates=True),
    "spectral": Recipe("neumann", "Neumann", 0.03, rates=True),
}


@dataclass(frozen=True)
class Arm:
    """An optimizer with options, as a comparison names it."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    text: bool | None = None  # whether it trains on text; None: not known yet

    @staticmethod
    def parse(text: str) -> "Arm":
        name, _, rest = text.partition(":")
        if name not in RECIPES:
            raise unknown("optimizer", name, RECIPES)
        options = tuple(_parse_option(text, piece) for piece in _split_options(rest))
        for key, count in Counter(key for key, _ in options).items():
            require(count == 1, f"{text!r} names {key} twice")
        return Arm(name, options)

    def on(self, data: str) -> "Arm":
        """The arm on a data set: on text, some names mean another optimizer."""
        return replace(self, text=is_text(data))

    def check(self) -> None:
        """Refuse unknown options: as long as the data is not known, those of neither kind."""
        if self.text is None and self.name in TEXT_RECIPES:
            both = [replace(self, text=text) for text in (False, True)]
            known = set[str]().union(*(arm._list_options(required=False) for arm in both))
        else:
            known = self._list_options()
        for key, _ in self.options:
            if key not in known:
                raise unknown(f"{self.name} option", key, sorted(known))
        if list_length_options(known):
            parse_length_options(self, self.options)

    def _list_options(self, required: bool = True) -> set[str]:
        """What an arm may name. If the optimizer is not required, it may be missing."""
        recipe = self.recipe
        known = {DECAY_NORMS, *recipe.role_options}
        known |= set() if recipe.assemble is None else {REST_BETAS}
        with contextlib.nullcontext() if required else contextlib.suppress(UsageError):
            known |= inspect.signature(recipe.load()).parameters.keys()
        return (known | set(list_length_options(known))) - {"params", *recipe.fixed}

    def with_options(self, **options: Any) -> "Arm":
        """Return a copy in which these options replace or extend its own."""
        return replace(self, options=tuple({**dict(self.options), **options}.items()))

    def without_lr(self) -> "Arm":
        return replace(self, options=tuple(pair for pair in self.options if pair[0] != "lr"))

    def lr(self, default: float | None = None) -> float:
        """Return the learning rate: the arm's own, else `default`, else the recipe's."""
        lr = dict(self.options).get("lr", default)
        return self.recipe.lr if lr is None else _to_float(self, "lr", lr)

    @property
    def recipe(self) -> Recipe:
        """The recipe; text and Neumann with a preconditioner for all parameters have their own."""
        if self.text and self.name in TEXT_RECIPES:
            return TEXT_RECIPES[self.name]
        chosen = dict(self.options).get("precondition")
        if self.name != "neumann" or chosen is None:
            return RECIPES[self.name]
        return PRECONDITIONED.get(str(chosen), PRECONDITIONED["spectral"])

    @property
    def code(self) -> str | None:
        """The user's MODULE:FUNCTION that building the optimizer calls, if there is one."""
        chosen = dict(self.options).get("precondition") if self.name == "neumann" else None
        return chosen if isinstance(chosen, str) and ":" in chosen else None

    def __str__(self) -> str:
        listed = ",".join(f"{key}={_format(value)}" for key, value in self.options)
        return f"{self.name}:{listed}" if listed else self.name


def build_optimizer(
    arm: Arm,
    model: nn.Module,
    *,
    steps_per_epoch: int,
    steps: int | None = None,
    lr: float | None = None,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Build the arm's optimizer; its own lr and weight decay come before the given ones.

    `steps` is the length of the run, from which `weight_decay=auto` and shares of it follow.
    """
    arm.check()
    recipe = arm.recipe
    constructor = recipe.load()
    options = {**recipe.options, **dict(arm.options), "lr": arm.lr(lr)}
    decay_norms = options.pop(DECAY_NORMS, recipe.decay_norms)
    named = options.pop("weight_decay", weight_decay)
    if named == AUTO and recipe.by_role and steps is not None:
        named = choose_weight_decay(model, steps, options["lr"])
    weight_decay = _to_float(arm, "weight_decay", named)
    if recipe.attribute == "Neumann":
        options = resolve_length_options(arm, options, steps, steps_per_epoch)
        options.setdefault("steps_per_epoch", steps_per_epoch)
        if arm.code is not None:
            options["precondition"] = call_user_function(arm.code, "precondition")
    fusable = "fused" in inspect.signature(constructor).parameters and "foreach" not in options
    if fusable and all(p.is_cuda for p in model.parameters()):
        options.setdefault("fused", True)
    try:
        of_roles = {name: options.pop(name) for name in recipe.role_options if name in options}
        groups: Any
        if recipe.by_role:
            groups = group_by_role(model, weight_decay, of_roles, decay_norms)
        elif recipe.assemble is not None or of_roles:
            both = f"{DECAY_NORMS} and {', '.join(of_roles)} exclude each other"
            require(DECAY_NORMS not in dict(arm.options), both)
            groups = group_by_rate(model, options["lr"], weight_decay, of_roles)
        else:
            groups = group_parameters(model, weight_decay, decay_norms)
        build = constructor if recipe.assemble is None else partial(recipe.assemble, constructor)
        optimizer: Any = build(groups, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{arm}: {shorten(error)}") from error
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()  # schedule-free optimizers start in neither mode
    built: Optimizer = optimizer
    return built


def group_parameters(
    model: nn.Module, weight_decay: float, decay_norms: bool
) -> list[dict[str, Any]]:
    """Return one group, or two if weight decay spares biases and normalization weights."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    require(bool(parameters), "the model has no parameter that requires gradients")
    if decay_norms or weight_decay == 0:
        return [{"params": parameters, "weight_decay": weight_decay}]
    # A parameter with one dimension is a bias or the scale of a normalization.
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


@contextlib.contextmanager
def evaluation_mode(optimizer: Any) -> Iterator[None]:
    """Switch the weights to those to evaluate, for optimizers that keep a second set."""
    switches = callable(getattr(optimizer, "eval", None))
    if switches:
        optimizer.eval()
    try:
        yield
    finally:
        if switches:
            optimizer.train()


def _split_options(text: str) -> list[str]:
    """Split at commas outside brackets."""
    pieces, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece for piece in pieces if piece.strip()]


def _parse_option(text: str, piece: str) -> tuple[str, Any]:
    key, equals, value = (part.strip() for part in piece.partition("="))
    wellformed = bool(key.isidentifier() and equals and value)
    require(wellformed, f"{text!r}: {piece!r} should be key=value")
    if value.lower() in WORDS:
        return key, WORDS[value.lower()]
    if value.removeprefix("torch.") in DTYPES:
        return key, DTYPES[value.removeprefix("torch.")]
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: nested too deep
        return key, value  # a word, such as variables=elements


def _to_float(arm: Arm, key: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    require(number, f"{arm}: {key} must be a number, got {value}")
    return float(value)


def _format(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
