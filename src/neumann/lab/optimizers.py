"""The arms of a comparison: which optimizer, with which options, as `neumann:lr=0.2,momentum=0.8`.

Every optimizer comes from where it is kept (torch, timm, schedulefree, this package); a recipe only
says which options are usual for it and whether it decays biases and normalisation weights. What an
arm names wins over the recipe. Every option of a constructor is reachable; one it does not have is
refused, with the nearest names.
"""

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from neumann.lab.entries import made_by
from neumann.lab.errors import UsageError, missing_package, shorten, unknown

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
WORDS = {"true": True, "false": False, "none": None}
DECAY_NORMS = "decay_norms"  # an option of every arm: decay biases and norms too


@dataclass(frozen=True)
class Recipe:
    """Where an optimizer is found, and how it is usually run."""

    module: str
    attribute: str
    lr: float  # where neither the arm nor the command names one
    options: Mapping[str, Any] = field(default_factory=dict)
    decay_norms: bool = False  # whether weight decay acts on biases and normalisation weights
    extra: str | None = None  # to install, where it is not torch's or ours
    sharded: bool = True  # whether it takes weights sharded by FSDP2

    def load(self) -> Callable[..., Optimizer]:
        """The constructor; a missing package is an error that names the extra."""
        try:
            module = import_module(self.module)
        except ImportError as error:
            package = self.module.split(".")[0]
            raise missing_package(package, self.extra or "lab", self.attribute) from error
        constructor: Callable[..., Optimizer] = getattr(module, self.attribute)
        return constructor


_MOMENTUM = {"momentum": 0.9, "nesterov": True}
_RMS = {"alpha": 0.9, "momentum": 0.9}
RECIPES = {
    "neumann": Recipe("neumann", "Neumann", 0.2, decay_norms=True),
    "sgd": Recipe("torch.optim", "SGD", 0.2, _MOMENTUM, decay_norms=True),
    "rmsprop": Recipe("torch.optim", "RMSprop", 1e-3, _RMS),
    "rmsproptf": Recipe("timm.optim", "RMSpropTF", 0.01, {**_RMS, "eps": 1.0}, extra="timm"),
    "adam": Recipe("torch.optim", "Adam", 1e-3),
    "adamw": Recipe("torch.optim", "AdamW", 2e-3),
    "nadam": Recipe("torch.optim", "NAdam", 1e-3),
    "nadamw": Recipe("torch.optim", "NAdam", 2e-3, {"decoupled_weight_decay": True}),
    "lars": Recipe("timm.optim", "Lars", 1.0, _MOMENTUM, extra="timm"),
    "lamb": Recipe("timm.optim", "Lamb", 5e-3, extra="timm"),
    "muon": Recipe(
        "timm.optim.muon", "Muon", 0.02, {"nesterov": True}, extra="timm", sharded=False
    ),
    "schedulefree": Recipe("schedulefree", "AdamWScheduleFree", 2e-3, extra="schedulefree"),
}
PRECONDITIONED = Recipe("neumann", "Neumann", 0.03)  # decays as AdamW does


@dataclass(frozen=True)
class Arm:
    """An optimizer with options, as a comparison names it."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def parse(text: str) -> "Arm":
        """From `name` or `name:key=value,key=value`; values are Python's, true, false or none."""
        name, _, rest = text.partition(":")
        if name not in RECIPES:
            raise unknown("optimizer", name, RECIPES)
        options = tuple(_pair(text, piece) for piece in _pieces(rest))
        keys = [key for key, _ in options]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice:
            raise UsageError(f"{text!r} names {twice} twice")
        return Arm(name, options)

    def check(self) -> None:
        """Refuse options that the optimizer does not have."""
        known = {DECAY_NORMS, *inspect.signature(self.recipe.load()).parameters} - {"params"}
        for key, _ in self.options:
            if key not in known:
                raise unknown(f"option of {self.name}", key, sorted(known))

    def with_options(self, **options: Any) -> "Arm":
        """The same with these options in the place of its own."""
        return Arm(self.name, tuple({**dict(self.options), **options}.items()))

    def lr(self, default: float | None = None) -> float:
        """The learning rate: the arm's own, else the command's, else the recipe's."""
        own = dict(self.options).get("lr", default)
        return self.recipe.lr if own is None else _number(self, "lr", own)

    @property
    def recipe(self) -> Recipe:
        """How the optimizer is usually run with these options."""
        precondition = dict(self.options).get("precondition")
        if self.name == "neumann" and precondition is not None:
            return PRECONDITIONED
        return RECIPES[self.name]

    def __str__(self) -> str:
        listed = ",".join(f"{key}={_spelled(value)}" for key, value in self.options)
        return f"{self.name}:{listed}" if listed else self.name


def build(
    arm: Arm,
    model: nn.Module,
    *,
    steps_per_epoch: int,
    lr: float | None = None,
    weight_decay: float = 0.0,
) -> Optimizer:
    """The arm's optimizer for those of the model's parameters that require gradients."""
    arm.check()
    recipe = arm.recipe
    constructor = recipe.load()
    options = {**recipe.options, **dict(arm.options), "lr": arm.lr(lr)}
    decay_norms = options.pop(DECAY_NORMS, recipe.decay_norms)
    decay = _number(arm, "weight_decay", options.pop("weight_decay", weight_decay))
    if arm.name == "neumann":
        options.setdefault("steps_per_epoch", steps_per_epoch)
        if ":" in str(options.get("precondition")):  # one of the user's own
            options["precondition"] = made_by(options["precondition"], "precondition")
    fusable = "fused" in inspect.signature(constructor).parameters and "foreach" not in options
    if fusable and all(p.is_cuda for p in model.parameters()):
        options.setdefault("fused", True)
    try:
        optimizer: Any = constructor(parameter_groups(model, decay, decay_norms), **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{arm}: {shorten(error)}") from error
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()  # schedule-free ones start out neither way
    built: Optimizer = optimizer
    return built


def parameter_groups(model: nn.Module, decay: float, decay_norms: bool) -> list[dict[str, Any]]:
    """One group, or two where decay leaves biases and normalisation weights alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise UsageError("the model has no parameter that requires gradients")
    if decay_norms or decay == 0:
        return [{"params": parameters, "weight_decay": decay}]
    # What has one dimension is a bias or the scale of a normalisation.
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


@contextmanager
def evaluating(optimizer: Any) -> Iterator[None]:
    """The weights to evaluate for the length of a block, for optimizers that keep two kinds."""
    switches = callable(getattr(optimizer, "eval", None))
    if switches:
        optimizer.eval()
    try:
        yield
    finally:
        if switches:
            optimizer.train()


def _pieces(text: str) -> list[str]:
    """Split at commas, but not at those inside brackets."""
    pieces, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece for piece in pieces if piece.strip()]


def _pair(text: str, piece: str) -> tuple[str, Any]:
    key, equals, value = (part.strip() for part in piece.partition("="))
    if not (key.isidentifier() and equals and value):
        raise UsageError(f"{text!r}: {piece!r} should be key=value")
    if value.lower() in WORDS:
        return key, WORDS[value.lower()]
    if value.removeprefix("torch.") in DTYPES:
        return key, DTYPES[value.removeprefix("torch.")]
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value  # a word, such as variables=elements


def _number(arm: Arm, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{arm}: {key} must be a number, got {value}")
    return float(value)


def _spelled(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
