"""Learning-rate schedules as factors: closed forms of the step, so that a resumed run has the same.

    ramp       (t + 1)/R                              the first R steps
    constant   1
    linear     1 − s                                  s = (t − R)/(T − R), from 0 to 1
    cosine     (1 + cos πs)/2
    step       0.3^⌊(t − R)/(40 epochs)⌋              the paper's, section 4.1
    rescaled   0.3^⌊s·140/40⌋                         the same drops in a run of any length
    inverse    1/(1 + (t − R)/D), D = one epoch       the η ∝ 1/t of section 3.1

The paper trains for 140 epochs, so its drops come at 2/7, 4/7 and 6/7 of a run; `rescaled` puts
them there. t counts optimizer steps from 0, T is their number.
"""

import math
from typing import Literal, get_args

from neumann.lab.errors import unknown

Schedule = Literal["constant", "linear", "cosine", "step", "rescaled", "inverse"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)

DROP = 0.3
DROP_EPOCHS = 40
PAPER_EPOCHS = 140


def factor(
    schedule: str, step: int, *, total_steps: int, ramp_steps: int, steps_per_epoch: int
) -> float:
    """What the learning rate is multiplied by in optimizer step `step`, counted from 0."""
    if schedule not in SCHEDULES:
        raise unknown("schedule", schedule, SCHEDULES)
    if step < ramp_steps:
        return (step + 1) / ramp_steps  # so that the first step moves
    done = step - ramp_steps
    share = min(done / max(total_steps - ramp_steps, 1), 1.0)
    if schedule == "linear":
        return 1.0 - share
    if schedule == "cosine":
        return (1 + math.cos(math.pi * share)) / 2
    if schedule == "step":
        return float(DROP ** (done // (DROP_EPOCHS * steps_per_epoch)))
    if schedule == "rescaled":
        return float(DROP ** math.floor(share * PAPER_EPOCHS / DROP_EPOCHS))
    if schedule == "inverse":
        return 1 / (1 + done / steps_per_epoch)
    return 1.0
