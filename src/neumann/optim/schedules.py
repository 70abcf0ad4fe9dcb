"""The paper's learning-rate rules as ordinary torch schedulers, stepped once per optimizer step.

Every rule is a ramp times a decay. With η the learning rate each group had when the schedule was
built, R = ``ramp_steps`` and t the number of scheduler steps so far:

    η(t) = η·(1 + (scale − 1)·t/R)           t < R, the ramp from η to scale·η (Goyal et al. 2017)
    η(t) = η·scale·decay(t − R)              t ≥ R

    LinearScaling    decay(t) = 1                        scale = batch_size / base_batch
    StepDecay        decay(t) = factor^⌊t / period⌋      ×0.3 every 40 epochs in section 4.1
    InverseTime      decay(t) = 1 / (1 + t/decay_steps)  the η ∝ 1/t of section 3.1

The decay's clock starts at the end of the ramp, so ``StepDecay`` after a ramp of 5 epochs drops at
epochs 45, 85, … The rules are closed forms of t: a resumed run has the learning rates of an
uninterrupted one. As with every torch scheduler, build optimizer and schedule first and load both
states after that; the loaded state brings the schedule's own settings along.

How it fails: the ramp is defined in steps, so a schedule stepped once per epoch ramps and decays
far too slowly. And a run shorter than the SGD warm-up of ``Neumann`` never gets to its iteration;
a schedule that is told ``total_steps`` warns of it.
"""

import math
import warnings

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["InverseTime", "LinearScaling", "StepDecay"]


class _RampedSchedule(LRScheduler):
    """A ramp from η to scale·η, then ``decay`` of the steps since its end."""

    def __init__(
        self,
        optimizer: Optimizer,
        scale: float | None,
        ramp_steps: int,
        total_steps: int | None,
        last_epoch: int,
    ) -> None:
        _require_integer("ramp_steps", ramp_steps, least=0)
        if scale is None:
            if ramp_steps > 0:
                raise ValueError(
                    f"ramp_steps={ramp_steps} needs scale, the ratio of the learning rate at the "
                    "end of the ramp to the one at its start, got None"
                )
            scale = 1.0
        _require_positive("scale", scale)
        if total_steps is not None:
            _require_integer("total_steps", total_steps, least=1)
        self.scale = scale
        self.ramp_steps = ramp_steps
        # torch computes the first learning rate in here, so the settings come before it.
        super().__init__(optimizer, last_epoch)
        if total_steps is not None:
            _warn_if_all_warmup(optimizer, total_steps)

    def decay(self, steps: int) -> float:
        """The fraction of the peak left ``steps`` ≥ 0 steps after the end of the ramp."""
        return 1.0

    def get_lr(self) -> list[float | Tensor]:
        step = self.last_epoch
        if step < self.ramp_steps:
            multiplier = 1 + (self.scale - 1) * step / self.ramp_steps
        else:
            multiplier = self.scale * self.decay(step - self.ramp_steps)
        return [base * multiplier for base in self.base_lrs]


class LinearScaling(_RampedSchedule):
    """Learning rate proportional to the batch: from η to η·``batch_size``/``base_batch``, constant.

    The optimizer's learning rate is the one tuned at ``base_batch``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        batch_size: int,
        base_batch: int,
        ramp_steps: int = 0,
        total_steps: int | None = None,
        last_epoch: int = -1,
    ) -> None:
        _require_integer("batch_size", batch_size, least=1)
        _require_integer("base_batch", base_batch, least=1)
        super().__init__(optimizer, batch_size / base_batch, ramp_steps, total_steps, last_epoch)


class StepDecay(_RampedSchedule):
    """A learning rate multiplied by ``factor`` every ``every_epochs`` epochs.

    A ramp goes from the optimizer's learning rate to ``scale`` times it, and needs ``scale``:
    ``batch_size / base_batch`` for linear scaling.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        steps_per_epoch: int,
        factor: float = 0.3,
        every_epochs: int = 40,
        scale: float | None = None,
        ramp_steps: int = 0,
        total_steps: int | None = None,
        last_epoch: int = -1,
    ) -> None:
        _require_integer("steps_per_epoch", steps_per_epoch, least=1)
        _require_integer("every_epochs", every_epochs, least=1)
        _require_positive("factor", factor)
        self.period = every_epochs * steps_per_epoch
        self.factor = factor
        super().__init__(optimizer, scale, ramp_steps, total_steps, last_epoch)

    def decay(self, steps: int) -> float:
        return float(self.factor ** (steps // self.period))


class InverseTime(_RampedSchedule):
    """A learning rate falling as 1/(1 + t/``decay_steps``): half its peak at t = ``decay_steps``.

    For t far above ``decay_steps`` this is the paper's η ∝ 1/t, without its infinity at t = 0.
    The ramp is that of ``StepDecay``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        decay_steps: float,
        scale: float | None = None,
        ramp_steps: int = 0,
        total_steps: int | None = None,
        last_epoch: int = -1,
    ) -> None:
        _require_positive("decay_steps", decay_steps)
        self.decay_steps = decay_steps
        super().__init__(optimizer, scale, ramp_steps, total_steps, last_epoch)

    def decay(self, steps: int) -> float:
        return 1 / (1 + steps / self.decay_steps)


def _warn_if_all_warmup(optimizer: Optimizer, total_steps: int) -> None:
    warmup_steps = optimizer.param_groups[0].get("warmup_steps")
    if warmup_steps is not None and warmup_steps >= total_steps:
        warnings.warn(
            f"the run of total_steps={total_steps} ends inside the optimizer's SGD warm-up of "
            f"{warmup_steps} steps, so the Neumann iteration never starts: lower warmup_epochs or "
            "warmup_steps of the optimizer",
            UserWarning,
            stacklevel=4,
        )


def _require_integer(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def _require_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and above 0, got {value!r}")
