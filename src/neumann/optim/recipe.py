"""From a model and a number of steps to an optimizer and its schedule, in one call:

    optimizer, schedule = large_batch(model, steps=2_000)
    for batch in loader:
        loss = compute_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

Every parameter gets the preconditioner, decay and scale of its role (`param_groups`). The learning
rate rises over the first steps and then falls on a straight line to zero at the last one
(`LinearDecay`). Both can be used without the other.

How it can fail: with `steps` larger than the run, the rate never falls to zero, and most of the
gain of the last steps is lost; with fewer, the learning rate is 0 in the steps after them.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from neumann.optim.groups import RoleOptions, param_groups
from neumann.optim.neumann import Neumann
from neumann.optim.schedules import LinearDecay
from neumann.validation import is_count, is_number, require

LR = 0.03
WEIGHT_DECAY = 0.05
RAMP = 0.03  # of the steps


def large_batch(
    model: nn.Module,
    steps: int,
    *,
    lr: float | Tensor = LR,
    weight_decay: float = WEIGHT_DECAY,
    ramp: float = RAMP,
    roles: Mapping[str, str] | None = None,
    options: Mapping[str, RoleOptions] | None = None,
    split_heads: bool = False,
    **neumann: Any,
) -> tuple[Neumann, LinearDecay]:
    """A ready optimizer and its schedule for training in few, large steps.

    Args:
        model: any module, before or after FSDP2, DDP and torch.compile.
        steps: optimizer steps of the whole run. Call `schedule.step()` after each of them.
        lr: the peak learning rate, the same for models of all widths.
        weight_decay: decoupled, of hidden matrices and the output layer.
        ramp: the share of the steps over which the rate rises.
        roles: roles by pattern of names, as for `param_groups`.
        options: other options for some roles, as for `param_groups`.
        split_heads: orthogonalize fused attention projections head by head.
        **neumann: further options of `Neumann`, such as `momentum` or `state_dtype`.

    Raises:
        ValueError: an argument is wrong, or a parameter has no role. Nothing has changed.
    """
    require(is_count(steps) and steps >= 1, "steps", steps, "an integer of at least 1")
    require(is_number(weight_decay), "weight_decay", weight_decay, "a finite number of at least 0")
    refuse_precondition(neumann)
    good = is_number(ramp) and 0 <= ramp < 1
    require(good, "ramp", ramp, "a share of the steps, from 0 to below 1")
    groups = param_groups(
        model, roles=roles, options=options, weight_decay=weight_decay, split_heads=split_heads
    )
    optimizer = Neumann(groups, lr, **neumann)
    ramp_steps = max(1, round(ramp * steps)) if ramp else 0
    return optimizer, LinearDecay(optimizer, total_steps=int(steps), ramp_steps=ramp_steps)


def refuse_precondition(options: Mapping[str, Any]) -> None:
    """Raise if one preconditioner is named where each role has its own."""
    if "precondition" in options:
        raise ValueError(
            f"precondition={options['precondition']!r}: each role has a preconditioner of its own; "
            "pass options={role: RoleOptions(…)} to change one"
        )
