"""The arms of a comparison: an optimizer with options, written as `neumann:lr=0.2,momentum=0.8`.

`arm_recipes` has the optimizers. An arm may name any option of the constructor, which overrides the
recipe's; an unknown one is a UsageError that suggests the nearest names.
"""

import ast
import contextlib
import inspect
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from neumann.lab.data.dataset import is_text
from neumann.lab.errors import UsageError, require, shorten, unknown
from neumann.lab.lengths import (
    list_length_options,
    parse_length_options,
    resolve_length_options,
)
from neumann.lab.optimizers.arm_recipes import (
    DECAY_NORMS,
    PRECONDITIONED,
    RECIPES,
    TEXT_RECIPES,
    Recipe,
)
from neumann.lab.optimizers.matrix_arms import REST_BETAS, check_betas
from neumann.lab.optimizers.role_arms import group_by_role
from neumann.lab.optimizers.role_rates import group_by_rate
from neumann.lab.user_code import call_user_function
from neumann.optim import Neumann
from neumann.optim.recipe import AUTO, choose_weight_decay

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
WORDS = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    "none": None,
}
NOT_FINITE = ("nan", "inf", "-inf")
LONG_EPOCH, LONG_RUN = 10**4, 10**8  # in steps; any warm-up fits in


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
        listed = ",".join(f"{key}={format_value(value)}" for key, value in self.options)
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
    good = weight_decay >= 0
    require(good, f"{arm}: weight_decay must be at least 0, got {weight_decay:g}")
    if recipe.attribute == "Neumann":
        options = resolve_length_options(arm, options, steps, steps_per_epoch)
        options.setdefault("steps_per_epoch", steps_per_epoch)
        if arm.code is not None:
            options["precondition"] = call_user_function(arm.code, "precondition")
    parameters = inspect.signature(constructor).parameters
    switches = {name for name, p in parameters.items() if isinstance(p.default, bool)}
    for name in {DECAY_NORMS, *switches} & dict(arm.options).keys():
        value = dict(arm.options)[name]
        require(isinstance(value, bool), f"{arm}: {name} must be true or false, got {value}")
    fusable = "fused" in parameters and "foreach" not in options
    if fusable and all(p.is_cuda for p in model.parameters()):
        options.setdefault("fused", True)
    try:
        if "betas" in options:
            check_betas("betas", options["betas"], parameters["betas"].default)
        of_roles = {name: options.pop(name) for name in recipe.role_options if name in options}
        groups: Any
        if recipe.by_role:
            groups = group_by_role(model, weight_decay, of_roles, decay_norms, steps)
        elif recipe.assemble is not None or of_roles:
            both = f"{DECAY_NORMS} and {', '.join(of_roles)} cannot be combined"
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


def check_arm(arm: Arm) -> None:
    """Refuse options that no network could be trained with, before any data is read.

    It builds the optimizer for a tiny network that has a parameter of every role.
    """
    if arm.code is not None:  # a user's function may need the user's network
        arm.check()
        return
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        tiny = nn.Sequential(nn.Embedding(2, 2), nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    build_optimizer(arm, tiny, steps_per_epoch=LONG_EPOCH, steps=LONG_RUN)


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
    """Switch the weights to those to evaluate, for optimizers that keep a second set.

    Training goes on with the same bits. Neumann takes care of that itself; schedule-free optimizers
    compute their weights back, which rounds.
    """
    if not callable(getattr(optimizer, "eval", None)):
        yield
        return
    rounds = not isinstance(optimizer, Neumann)
    held = [p for group in optimizer.param_groups for p in group["params"]] if rounds else []
    saved = [p.detach().clone() for p in held]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        with torch.no_grad():
            for p, before in zip(held, saved, strict=True):
                p.copy_(before)


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
    require(value.lower() not in NOT_FINITE, f"{text!r}: {key} must be finite, got {value}")
    if value.removeprefix("torch.") in DTYPES:
        return key, DTYPES[value.removeprefix("torch.")]
    try:
        parsed = ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: nested too deep
        return key, value  # a word, such as variables=elements
    overflown = isinstance(parsed, float) and math.isinf(parsed)
    require(not overflown, f"{text!r}: {key} must be finite, got {value}")
    return key, parsed


def _to_float(arm: Arm, key: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    require(number, f"{arm}: {key} must be a number, got {value}")
    return float(value)


def format_value(value: Any) -> str:
    """A value as it is written in an arm: true, false and none in lower case."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
