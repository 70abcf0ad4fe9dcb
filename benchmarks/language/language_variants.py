"""The leads as variants of the recipe and of Muon: what each changes, and how strongly.

A variant is an arm with something done to its P (`lead_preconditioners`, `output_preconditioners`),
or around its steps (`step_wrappers`). `VARIANTS` has them by name.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from benchmarks.language.language_arms import Setting, build_arm, build_recipe
from benchmarks.language.lead_preconditioners import (
    EvenRows,
    ScaledRows,
    SlowSum,
    Whitened,
)
from benchmarks.language.output_preconditioners import RotatedDiagonal, WhitenedRows
from benchmarks.language.step_wrappers import (
    CautiousDecay,
    ChangedGradients,
    Cooldown,
    Extrapolated,
    FixedNorm,
    HiddenRate,
    LateCooldown,
    RotatedOutput,
    Wrapper,
)
from neumann.lab.optimizers.role_rates import collect_roles
from neumann.optim.preconditioners import Momentum, Preconditioner, SlowMomentum
from neumann.optim.preconditioners.matrix_view import MatrixView
from neumann.optim.recipe import SLOW_FROM, make_slow_momentum

RECIPE, MUON = "recipe", "muon by norm"
# Strengths of the leads that are tried together.
SLOW, SLOW_SHARE, WHITENING, CAUTION = 0.98, 0.6, 0.3, 1.5
SLOW_WEIGHT = 0.15  # of a slow sum; it is a share of 0.6 after many steps
ROTATION = 1.5  # of the rotated output layer's steps
QUERIES_AND_KEYS = ("query.weight", "key.weight")
VALUES = ("value.weight", "attention_out.weight")
FORWARD = ("forward_in.weight", "forward_out.weight")

Build = Callable[[nn.Module, Setting, int], Any]


def _extrapolate(model: nn.Module, setting: Setting, steps: int, memory: float) -> Wrapper:
    return Extrapolated(build_arm(model, setting, steps), setting, steps, memory)


def _fix_norm(model: nn.Module, setting: Setting, steps: int) -> Wrapper:
    hidden = collect_roles(model)["hidden"]
    return FixedNorm(build_arm(model, setting, steps), setting, steps, hidden)


def _change_hidden_rate(model: nn.Module, setting: Setting, steps: int) -> Wrapper:
    hidden = collect_roles(model)["hidden"]
    return HiddenRate(build_arm(model, setting, steps), setting, steps, hidden)


def _change_decay(model: nn.Module, setting: Setting, steps: int) -> Any:
    return build_arm(model, replace(setting, decay=setting.decay * setting.strength), steps)


def _decay_cautiously(model: nn.Module, setting: Setting, steps: int) -> Wrapper:
    return CautiousDecay(build_arm(model, setting, steps), setting, steps)


def _cool_down(model: nn.Module, setting: Setting, steps: int) -> Wrapper:
    return Cooldown(build_arm(model, setting, steps), setting, steps)


def _cool_down_late(model: nn.Module, setting: Setting, steps: int) -> Wrapper:
    return LateCooldown(build_arm(model, setting, steps), setting, steps)


def _change_rate(model: nn.Module, setting: Setting, steps: int) -> Any:
    faster = replace(setting, lr=setting.lr * setting.strength)
    return build_arm(model, replace(faster, decay=setting.decay / setting.strength), steps)


def _cool_down_rest(model: nn.Module, setting: Setting, steps: int) -> Wrapper:
    roles = collect_roles(model)
    chosen = roles["embedding"] + roles["output"]
    return Cooldown(build_arm(model, setting, steps), setting, steps, chosen)


def _change_before(
    model: nn.Module,
    setting: Setting,
    steps: int,
    make: Callable[[Setting, int], Preconditioner],
) -> Any:
    """Something other than momentum between the gradients and the polar step."""
    before = make(setting, steps)
    if setting.arm == RECIPE:
        return build_recipe(model, setting, lambda p: replace(p, before=before))
    arm = build_arm(model, setting, steps)
    return ChangedGradients(arm, setting, steps, collect_roles(model)["hidden"], before)


def _make_slow_momentum(setting: Setting, steps: int, slow: float) -> Preconditioner:
    return SlowMomentum(setting.before, slow, setting.strength, round(SLOW_FROM * steps))


def _make_usual_slow(setting: Setting, steps: int) -> Preconditioner:
    return _make_slow_momentum(setting, steps, SLOW)


def _make_slow_by_length(setting: Setting, steps: int) -> Preconditioner:
    return make_slow_momentum(setting.before, steps, setting.strength)


def _make_slow_sum(setting: Setting, steps: int) -> Preconditioner:
    return SlowSum(setting.before, SLOW, setting.strength)


def _make_scaled_rows(setting: Setting, steps: int) -> Preconditioner:
    return ScaledRows(setting.strength, Momentum(setting.before))


def _make_slow_rows(setting: Setting, steps: int) -> Preconditioner:
    return ScaledRows(1.0, _make_slow_sum(setting, steps))


def _make_whitened(setting: Setting, steps: int, sides: str = "both") -> Preconditioner:
    return Whitened(setting.strength, Momentum(setting.before), sides)


def _make_slow_left(setting: Setting, steps: int) -> Preconditioner:
    slow = SlowSum(setting.before, SLOW, SLOW_WEIGHT)
    return Whitened(setting.strength, slow, "left")


def _make_slow_whitened(setting: Setting, steps: int) -> Preconditioner:
    slow = _make_slow_momentum(replace(setting, strength=SLOW_SHARE), steps, SLOW)
    return Whitened(setting.strength, slow, "shorter")


def _make_white_by_length(setting: Setting, steps: int) -> Preconditioner:
    return Whitened(WHITENING, _make_slow_by_length(setting, steps), "shorter")


def _put_together(model: nn.Module, setting: Setting, steps: int) -> Wrapper:
    """Whitening, slow momentum and cautious decay; the strength is that of `HiddenRate`."""
    whitened = replace(setting, strength=WHITENING)
    inner = _change_before(model, whitened, steps, _make_slow_whitened)
    faster = HiddenRate(inner, setting, steps, collect_roles(model)["hidden"])
    return CautiousDecay(faster, replace(setting, strength=CAUTION), steps)


def _put_rows_together(model: nn.Module, setting: Setting, steps: int) -> Wrapper:
    """Scaled rows, a slow sum and cautious decay; the strength is that of the decay."""
    inner = _change_before(model, replace(setting, strength=SLOW_WEIGHT), steps, _make_slow_rows)
    return CautiousDecay(inner, setting, steps)


def _put_cheap_together(
    model: nn.Module,
    setting: Setting,
    steps: int,
    *,
    slow: Callable[[Setting, int], Preconditioner] = _make_usual_slow,
    rotated: bool = False,
    cautious: bool = True,
) -> Wrapper:
    """Slow momentum, cautious decay and a power cooldown; the strength is that of the cooldown.

    Slow momentum may be another, the output layer rotated too, and the decay as it is.
    """
    inner = _change_before(model, replace(setting, strength=SLOW_SHARE), steps, slow)
    if rotated:
        inner = _rotate(inner, model, replace(setting, strength=ROTATION), steps)
    if cautious:
        inner = CautiousDecay(inner, replace(setting, strength=CAUTION), steps)
    return Cooldown(inner, setting, steps)


def _cool_down_cautiously(model: nn.Module, setting: Setting, steps: int) -> Wrapper:
    """Cautious decay and a power cooldown; the strength is that of the cooldown."""
    inner = build_arm(model, setting, steps)
    cautious = CautiousDecay(inner, replace(setting, strength=CAUTION), steps)
    return Cooldown(cautious, setting, steps)


def _split_heads(model: nn.Module, setting: Setting, steps: int) -> Any:
    """Queries and keys are orthogonalized head by head; the strength multiplies their steps."""
    heads = model.layers[0].heads  # type: ignore[index, union-attr]

    view = MatrixView(heads=heads)
    return _change_matrices(
        model, setting, steps, QUERIES_AND_KEYS, lambda p: replace(p, view=view)
    )


def _change_matrices(
    model: nn.Module,
    setting: Setting,
    steps: int,
    names: tuple[str, ...],
    change: Callable[[Any], Any] = lambda p: p,
) -> Any:
    """Another P for the hidden matrices whose names end so; the strength multiplies its steps."""

    def split(groups: list[dict[str, Any]]) -> None:
        whole = _find_role(groups, "hidden")
        chosen = [pair for pair in whole["params"] if pair[0].endswith(names)]
        whole["params"] = [pair for pair in whole["params"] if not pair[0].endswith(names)]
        p = change(whole["precondition"])
        p = replace(p, scale=p.scale * setting.strength)
        groups.append({**whole, "params": chosen, "precondition": p})

    return build_recipe(model, setting, change_groups=split)


def _change_momentum(model: nn.Module, setting: Setting, steps: int, role: str) -> Any:
    """Another μ for a role, with the same lr/(1 − μ); the strength is that μ."""

    def change(groups: list[dict[str, Any]]) -> None:
        group = _find_role(groups, role)
        p, share = group["precondition"], (1 - setting.strength) / (1 - setting.momentum)
        group["precondition"] = replace(p, scale=p.scale * share)
        group["momentum"] = setting.strength

    return build_recipe(model, setting, change_groups=change)


def _change_memory(model: nn.Module, setting: Setting, steps: int) -> Any:
    """The output layer's mean of squares forgets faster; the strength is its decay."""

    def change(groups: list[dict[str, Any]]) -> None:
        group = _find_role(groups, "output")
        group["precondition"] = replace(group["precondition"], decay=setting.strength)

    return build_recipe(model, setting, change_groups=change)


def _rotate_output(model: nn.Module, setting: Setting, steps: int) -> Any:
    """The output layer is divided in a rotated basis; the strength multiplies its steps."""
    return _rotate(build_arm(model, setting, steps), model, setting, steps)


def _rotate(inner: Any, model: nn.Module, setting: Setting, steps: int) -> Any:
    if setting.arm == RECIPE:
        _change_output(inner.param_groups, RotatedDiagonal, setting.strength)
        return inner
    (output,) = collect_roles(model)["output"]
    return RotatedOutput(inner, setting, steps, output)


def _rotate_and_cool_down(model: nn.Module, setting: Setting, steps: int) -> Wrapper:
    """A rotated output layer and a power cooldown; the strength is that of the cooldown."""
    rotated = _rotate_output(model, replace(setting, strength=ROTATION), steps)
    return Cooldown(rotated, setting, steps)


def _whiten_output(model: nn.Module, setting: Setting, steps: int, memory: float) -> Any:
    """The output layer has even rows that are whitened; the strength multiplies its steps."""
    optimizer = build_recipe(model, setting)
    _change_output(optimizer.param_groups, partial(WhitenedRows, memory), setting.strength)
    return optimizer


def _change_output(
    groups: list[dict[str, Any]], make: Callable[..., Preconditioner], strength: float
) -> None:
    """Another P for the output layer, with a multiple of the steps and the same momentum."""
    group = _find_role(groups, "output")
    p = group["precondition"]
    group["precondition"] = make(scale=p.scale * strength, before=p.before)


def _find_role(groups: list[dict[str, Any]], role: str) -> dict[str, Any]:
    (found,) = (group for group in groups if group["role"] == role)
    return found


def _even_rows(model: nn.Module, setting: Setting, steps: int) -> Any:
    def change(p: Any) -> Preconditioner:
        parts = {name: getattr(p, name) for name in p.__dataclass_fields__}
        return EvenRows(**parts, power=setting.strength)

    return build_recipe(model, setting, change)


@dataclass(frozen=True)
class Variant:
    """A lead, and the strengths to try."""

    build: Build
    strengths: tuple[float, ...]
    arms: tuple[str, ...] = (RECIPE, MUON)


COOLING = "cooling"
_BETAS, _SHARES = (0.1, 0.3, 0.6), (0.3, 0.6)
VARIANTS: dict[str, Variant] = {
    COOLING: Variant(build_arm, (0.5, 1.0), (RECIPE,)),  # Setting.cooling does it
    "extrapolation 0.9": Variant(partial(_extrapolate, memory=0.9), _BETAS),
    "extrapolation 0.97": Variant(partial(_extrapolate, memory=0.97), _BETAS),
    "slow momentum 0.95": Variant(
        partial(_change_before, make=partial(_make_slow_momentum, slow=0.95)), _SHARES
    ),
    "slow momentum 0.98": Variant(
        partial(_change_before, make=partial(_make_slow_momentum, slow=0.98)), _SHARES
    ),
    "whitening": Variant(partial(_change_before, make=_make_whitened), (0.15, 0.3)),
    "whitening, shorter side": Variant(
        partial(_change_before, make=partial(_make_whitened, sides="shorter")), (0.15, 0.3)
    ),
    "slow sum": Variant(partial(_change_before, make=_make_slow_sum), (0.08, 0.15, 0.3)),
    "scaled rows": Variant(partial(_change_before, make=_make_scaled_rows), (0.5, 1.0)),
    "scaled rows, slow sum": Variant(partial(_change_before, make=_make_slow_rows), (0.08, 0.15)),
    "scaled rows, slow, cautious": Variant(_put_rows_together, (1.0, 1.5)),
    "left whitening, slow sum": Variant(
        partial(_change_before, make=_make_slow_left), (0.15, 0.25)
    ),
    "whitening, slow momentum": Variant(
        partial(_change_before, make=_make_slow_whitened), (0.15, 0.3)
    ),
    "whitening, slow, cautious": Variant(_put_together, (1.0, 1.4)),
    "power cooldown, slow, cautious": Variant(_put_cheap_together, (0.7, 0.85)),
    "power cooldown, slow": Variant(partial(_put_cheap_together, cautious=False), (0.7, 0.85)),
    "power cooldown, slow by length": Variant(
        partial(_put_cheap_together, slow=_make_slow_by_length, cautious=False), (0.5, 0.7)
    ),
    "power cooldown, slow, whitening": Variant(
        partial(_put_cheap_together, slow=_make_white_by_length, cautious=False), (0.5, 0.7)
    ),
    "power cooldown, cautious": Variant(_cool_down_cautiously, (0.5, 0.7)),
    "late cooldown": Variant(_cool_down_late, (0.5, 0.7)),
    "head by head": Variant(_split_heads, (1.0, 2.5), (RECIPE,)),
    "rotated output": Variant(_rotate_output, (1.0, 1.5, 2.0)),
    "rotated output, power cooldown": Variant(_rotate_and_cool_down, (0.5, 0.7)),
    "rotated output, power, slow, cautious": Variant(
        partial(_put_cheap_together, rotated=True), (0.7, 0.85)
    ),
    "whitened output": Variant(partial(_whiten_output, memory=0.95), (1.0, 1.5), (RECIPE,)),
    "polar output": Variant(partial(_whiten_output, memory=0.0), (0.5, 1.0), (RECIPE,)),
    "queries and keys": Variant(
        partial(_change_matrices, names=QUERIES_AND_KEYS), (0.7, 1.5), (RECIPE,)
    ),
    "values": Variant(partial(_change_matrices, names=VALUES), (0.7, 1.5), (RECIPE,)),
    "forward layers": Variant(partial(_change_matrices, names=FORWARD), (0.7, 1.5), (RECIPE,)),
    "momentum of the output": Variant(
        partial(_change_momentum, role="output"), (0.4, 0.8), (RECIPE,)
    ),
    "momentum of embeddings": Variant(
        partial(_change_momentum, role="embedding"), (0.4, 0.8), (RECIPE,)
    ),
    "memory of the output": Variant(_change_memory, (0.9, 0.95), (RECIPE,)),
    "fixed norm": Variant(_fix_norm, (0.7, 1.0, 1.4)),
    "cautious decay": Variant(_decay_cautiously, (1.0, 1.5, 2.0)),
    "even rows": Variant(_even_rows, (0.5, 1.0), (RECIPE,)),  # for Muon: the arm normuon
    "slower rest": Variant(_cool_down_rest, (0.5, 0.7)),
    "power cooldown": Variant(_cool_down, (0.5, 0.7, 1.5, 2.0)),
    # Controls. A fixed norm and another cooldown must beat another rate, cautious decay less decay.
    "control: rate": Variant(_change_rate, (1.2, 1.4)),
    "control: hidden rate": Variant(_change_hidden_rate, (0.7, 1.4)),
    "control: decay": Variant(_change_decay, (0.4, 0.7)),
}


def make_variant(base: Setting, name: str, strength: float) -> Setting:
    """The setting of a lead on top of another setting."""
    if name == COOLING:
        return replace(base, cooling=strength)
    return replace(base, lead=name, strength=strength)


def list_variants(arm: str) -> dict[str, Variant]:
    """The leads that an arm can have."""
    return {name: variant for name, variant in VARIANTS.items() if arm in variant.arms}


def build_variant(model: nn.Module, setting: Setting, steps: int) -> Any:
    """The optimizer of a run of so many steps, with slow momentum or a lead if the setting has it.

    A setting has one of them at most.
    """
    if setting.slow and setting.lead:
        raise ValueError(f"lead {setting.lead!r} cannot have slow momentum beside it")
    if setting.slow:
        mixed = replace(setting, strength=setting.slow)
        return _change_before(model, mixed, steps, _make_slow_by_length)
    if not setting.lead:
        return build_arm(model, setting, steps)
    variant = VARIANTS.get(setting.lead)
    if variant is None or setting.arm not in variant.arms:
        raise ValueError(f"lead {setting.lead!r} does not exist for the arm {setting.arm!r}")
    return variant.build(model, setting, steps)
