"""The rules of learning-rate schedules, as functions of the step.

`schedules` has them as torch schedulers, with the formulas.
"""

import math

SCHEDULE_NAMES = ("constant", "linear", "power", "cosine", "step", "rescaled", "inverse")

STEP_FACTOR = 0.3
STEP_EPOCHS = 40
POWER = 0.7


def lr_factor(
    schedule: str,
    step: int,
    *,
    total_steps: int,
    ramp_steps: int,
    steps_per_epoch: int,
    power: float = POWER,
    factor: float = STEP_FACTOR,
    period_steps: float | None = None,
    decay_steps: float | None = None,
) -> float:
    """Return the factor of the peak learning rate in a step. All ramps start at zero.

    Args:
        schedule: `constant`, `linear`, `power`, `cosine`, `step` (× 0.3 every 40 epochs),
            `inverse` (half the peak one epoch after the ramp), or `rescaled`, which is × 0.3 at
            2/7, 4/7 and 6/7 of what follows the ramp. (The paper drops every 40 of its 210 to 258
            epochs, which is `step`, and about five times per run; `rescaled` is a shorter schedule
            of that kind.)
        step: the optimizer step, counted from 0.
        total_steps: optimizer steps of the run, the ramp included.
        ramp_steps: the first steps, in which the rate rises.
        steps_per_epoch: for the rules that are defined in epochs.
        power: the exponent of the schedule `power`.
        factor: what each drop of the schedule `step` multiplies the rate by.
        period_steps: steps between the drops of `step`. None is 40 epochs.
        decay_steps: steps after which `inverse` has half the peak. None is an epoch.

    Raises:
        ValueError: the schedule has another name.
    """
    if schedule not in SCHEDULE_NAMES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULE_NAMES)}; got {schedule!r}")
    if step < ramp_steps:
        return ramp_from_zero(step, ramp_steps)
    after = step - ramp_steps
    share = find_share(after, total_steps - ramp_steps)
    match schedule:
        case "linear":
            return 1.0 - share
        case "power":
            return float((1.0 - share) ** power)
        case "cosine":
            return fall_as_cosine(share)
        case "step":
            period = STEP_EPOCHS * steps_per_epoch if period_steps is None else period_steps
            return fall_in_drops(factor, period, after)
        case "rescaled":
            # share · 7/2, written so that it rounds as in earlier runs
            return float(STEP_FACTOR ** math.floor(share * 140 / 40))
        case "inverse":
            return fall_inversely(steps_per_epoch if decay_steps is None else decay_steps, after)
    return 1.0


def ramp_from_zero(step: int, ramp_steps: int) -> float:
    return (step + 1) / ramp_steps


def find_share(after: int, length: int) -> float:
    """The share of the steps after the ramp that are done, from 0 to 1."""
    return min(after / length, 1.0) if length > 0 else 1.0


def fall_as_cosine(share: float) -> float:
    return (1 + math.cos(math.pi * share)) / 2


def fall_in_drops(factor: float, period: float, after: int) -> float:
    return float(factor ** (after // period))


def fall_inversely(decay_steps: float, after: int) -> float:
    return 1 / (1 + after / decay_steps)
