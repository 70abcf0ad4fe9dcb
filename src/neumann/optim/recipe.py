"""From a model and a number of steps to an optimizer and its schedule, in one call:

    optimizer, schedule = large_batch(model, steps=2_000)
    for batch in loader:
        loss = compute_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

Every parameter gets the preconditioner, decay and scale of its role (`param_groups`). The learning
rate rises over the first steps and then falls to zero at the last one: on a straight line
(`LinearDecay`), or later and faster with a `power` below 1 (`PowerDecay`). Groups and schedule can
each be used alone.

How it can fail: with `steps` larger than the run, the rate never falls to zero, and most of the
gain of the last steps is lost; with `steps` smaller, it is 0 for the remaining steps.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal

from torch import Tensor, nn

from neumann.optim.groups import RoleOptions, param_groups
from neumann.optim.neumann import Neumann
from neumann.optim.option_checks import require_rate
from neumann.optim.preconditioners import Momentum, SlowMomentum
from neumann.optim.roles import HIDDEN, find_roles, is_batch_normalized
from neumann.optim.schedules import LinearDecay, PowerDecay
from neumann.validation import is_count, is_number, require

LR = 0.03
RAMP = 0.03  # of the steps
AUTO: Literal["auto"] = "auto"
FORGETTING = 2.5  # lr · decay · steps
FORGETTING_NORMALIZED = 10.0  # the same where a batch or group normalization follows most matrices
SLOW_FROM = 0.3  # of the steps: where slow momentum begins
SLOW_WINDOW = 0.25  # of the steps: how far it looks back
LARGEST_DECAY = 0.075  # lr · decay: the share of a weight that one step may take away


def large_batch(
    model: nn.Module,
    steps: int,
    *,
    lr: float | Tensor = LR,
    weight_decay: float | Literal["auto"] = AUTO,
    ramp: float = RAMP,
    power: float = 1.0,
    slow_momentum: float = 0.0,
    roles: Mapping[str, str] | None = None,
    options: Mapping[str, RoleOptions] | None = None,
    split_heads: bool = False,
    schedule_calls: int = 1,
    **optimizer_options: Any,
) -> tuple[Neumann, LinearDecay | PowerDecay]:
    """An optimizer and its schedule for training with large batches, in few steps.

    Args:
        model: any module; after FSDP2 if that is used, since it replaces parameters, and before or
            after DDP and torch.compile.
        steps: optimizer steps of the whole run. Call `schedule.step()` after each of them.
        lr: the peak learning rate, the same for models of all widths.
        weight_decay: of hidden matrices and the output layer, decoupled. "auto" computes it from lr
            and steps: see `choose_weight_decay`.
        ramp: the fraction of the steps in which the rate rises.
        power: the rate falls as (1 − t)^power, where t goes from 0 at the end of the ramp to 1.
        slow_momentum: the fraction of slow momentum in the directions of hidden matrices, from 0 to
            1. It takes one more tensor for each matrix. See `add_slow_momentum`.
        roles: {name pattern: role}, as for `param_groups`.
        options: other options for some roles, as for `param_groups`.
        split_heads: orthogonalize fused attention projections head by head.
        schedule_calls: how often `schedule.step()` is called after an optimizer step. Accelerate
            calls it once for each process.
        **optimizer_options: further options of `Neumann`, such as `momentum` or `state_dtype`.

    Raises:
        ValueError: an argument is wrong, or a parameter has no role. Nothing has changed.
        TypeError: neither this function nor `Neumann` has an argument of that name.
    """
    require(is_count(steps) and steps >= 1, "steps", steps, "an integer of at least 1")
    if isinstance(weight_decay, str):
        good = weight_decay == AUTO
    else:
        good = is_number(weight_decay) and weight_decay >= 0
    require(good, "weight_decay", weight_decay, '"auto" or a finite number of at least 0')
    good = is_count(schedule_calls) and schedule_calls >= 1
    require(good, "schedule_calls", schedule_calls, "an integer of at least 1")
    refuse_precondition(optimizer_options)
    _refuse_misspelled(optimizer_options)
    good = is_number(ramp) and 0 <= ramp < 1
    require(good, "ramp", ramp, "a share of the steps, from 0 to below 1")
    require(is_number(power) and power > 0, "power", power, "a finite number above 0")
    _require_share(slow_momentum)
    if isinstance(weight_decay, str):
        weight_decay = choose_weight_decay(model, steps, lr, roles=roles)
    groups = param_groups(
        model, roles=roles, options=options, weight_decay=weight_decay, split_heads=split_heads
    )
    if slow_momentum:
        add_slow_momentum(groups, steps, slow_momentum)
    # The decay is in the groups already; here it is for those that are added later.
    optimizer = Neumann(groups, lr, weight_decay=weight_decay, **optimizer_options)
    total = int(steps * schedule_calls)
    ramp_steps = max(1, round(ramp * total)) if ramp else 0
    if power == 1:
        return optimizer, LinearDecay(optimizer, total_steps=total, ramp_steps=ramp_steps)
    falling = PowerDecay(optimizer, total_steps=total, power=float(power), ramp_steps=ramp_steps)
    return optimizer, falling


def choose_weight_decay(
    model: nn.Module,
    steps: int,
    lr: float | Tensor = LR,
    *,
    roles: Mapping[str, str] | None = None,
) -> float:
    """The weight decay for which lr · decay · steps is 2.5, or 10 in a network such as a ResNet.

    lr · decay · steps says how much of the early weights is left at the end. If a batch or group
    normalization follows most of the hidden matrices, their size has no effect on what the network
    computes, and more decay is better. In a run of very few steps the decay is lower: a step
    removes at most 7.5 % of a weight.

    Args:
        model: as for `large_batch`.
        steps: optimizer steps of the whole run.
        lr: the peak learning rate.
        roles: as for `large_batch`.
    """
    require(is_count(steps) and steps >= 1, "steps", steps, "an integer of at least 1")
    require_rate(lr)
    normalized = is_batch_normalized(model, find_roles(model, roles))
    forgetting = FORGETTING_NORMALIZED if normalized else FORGETTING
    rate = float(lr)
    return min(forgetting / steps, LARGEST_DECAY) / rate if rate > 0 else 0.0


def add_slow_momentum(groups: Iterable[dict[str, Any]], steps: int, share: float) -> None:
    """Mix slow momentum into the directions of hidden matrices, from 30 % of the steps on.

    It is a mean of the gradients that looks back over a quarter of the run, in place of the few
    steps of the usual momentum. See `preconditioners.SlowMomentum`.

    Args:
        groups: those of `param_groups`, which are changed.
        steps: optimizer steps of the whole run.
        share: of slow momentum in a direction, from 0 to 1.

    Raises:
        ValueError: the share is wrong, or the P of hidden matrices has no `Momentum` before it.
    """
    _require_share(share)
    hidden = [group for group in groups if group["role"] == HIDDEN]
    for group in hidden:
        chosen = group["precondition"]
        if not (is_dataclass(chosen) and isinstance(getattr(chosen, "before", None), Momentum)):
            raise ValueError(
                f"slow_momentum={share:g}: the P of hidden matrices needs a Momentum before it, "
                f"got {chosen!r}"
            )
    for group in hidden:
        chosen = group["precondition"]
        mixed = make_slow_momentum(chosen.before.decay, steps, share)
        group["precondition"] = replace(chosen, before=mixed)


def make_slow_momentum(decay: float, steps: int, share: float) -> SlowMomentum:
    """The slow momentum for a run of `steps` steps, beside a usual momentum of this decay."""
    slow = max(0.0, 1 - 1 / (SLOW_WINDOW * steps))
    return SlowMomentum(decay, slow, share, round(SLOW_FROM * steps))


def _require_share(share: float) -> None:
    good = is_number(share) and 0 <= share <= 1
    require(good, "slow_momentum", share, "a share, from 0 to 1")


def refuse_precondition(options: Mapping[str, Any]) -> None:
    """Raise if one preconditioner is named where each role has its own."""
    if "precondition" in options:
        raise ValueError(
            f"precondition={options['precondition']!r}: each role has a preconditioner of its own; "
            "pass options={role: RoleOptions(…)} to change one"
        )


def _refuse_misspelled(options: Mapping[str, Any]) -> None:
    """Raise a TypeError for a keyword that neither `large_batch` nor `Neumann` has."""
    known = {*inspect.signature(Neumann).parameters, *inspect.signature(large_batch).parameters}
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"large_batch() has no argument {name!r}{hint}")
