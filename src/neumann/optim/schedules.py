"""Learning-rate schedules, as torch schedulers stepped once per optimizer step.

Every schedule is a ramp to a peak, followed by a rule for how the rate falls. Let η be the learning
rate a group had when the schedule was built, R = `ramp_steps`, T = `total_steps` and t the number
of scheduler steps so far. The peak is `scale`·η. During the ramp (t < R), depending on `ramp_from`,

    "base"    η(t) = η·(1 + (scale − 1)·t/R)      from η, as in the paper and Goyal et al. 2017
    "zero"    η(t) = η·scale·(t + 1)/R            from almost 0; the first step already moves

and after it η(t) = η·scale·f, where with n = t − R and s = n/(T − R), the share of the rest:

    LinearScaling    f = 1                              scale = batch_size / base_batch
    LinearDecay      f = 1 − s                          0 at the end
    PowerDecay       f = (1 − s)^power                  0 at the end; below 1 it falls later
    CosineDecay      f = (1 + cos πs)/2                 0 at the end
    StepDecay        f = factor^⌊n / period⌋            the paper's section 4.1: 0.3, 40 epochs;
                                                        its Inception baselines: 0.94, 2 epochs
    InverseTime      f = 1/(1 + n/decay_steps)          the η ∝ 1/t of the paper's section 3.1

The count n starts at the end of the ramp, so `StepDecay` after a ramp of 5 epochs drops at epochs
45, 85, … All rules are functions of t alone, so a resumed run has the learning rates of an
uninterrupted one. As with every torch scheduler, build optimizer and schedule first and then load
both states; the loaded state contains the settings of the schedule.

`lr_factor` gives the same rules by name, as a function of the step, without a scheduler object.

How it can fail: a schedule that is stepped once per epoch rises and falls far too slowly. If the
SGD warm-up of `Neumann` covers most of a run, few steps are left for its series; a schedule that
knows `total_steps` warns about it.
"""

from typing import Any, Literal, get_args

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from neumann.caller_warnings import warn_caller
from neumann.optim.long_warmup import warn_of_long_warmup
from neumann.optim.lr_rules import (
    POWER,
    STEP_EPOCHS,
    STEP_FACTOR,
    fall_as_cosine,
    fall_in_drops,
    fall_inversely,
    find_share,
    lr_factor,
    ramp_from_zero,
)
from neumann.validation import require_integer, require_positive

__all__ = [
    "CosineDecay",
    "InverseTime",
    "LinearDecay",
    "LinearScaling",
    "PowerDecay",
    "StepDecay",
    "lr_factor",
]

RampStart = Literal["base", "zero"]


class _RampedSchedule(LRScheduler):
    """A ramp to `scale`·η, then `factor_after_ramp`."""

    def __init__(
        self,
        optimizer: Optimizer,
        scale: float | None,
        ramp_steps: int,
        ramp_from: RampStart,
        total_steps: int | None,
        last_epoch: int,
    ) -> None:
        require_integer("ramp_steps", ramp_steps, least=0)
        if ramp_from not in get_args(RampStart):
            raise ValueError(f"ramp_from must be 'base' or 'zero', got {ramp_from!r}")
        if scale is None:
            if ramp_steps > 0 and ramp_from == "base":
                raise ValueError(
                    f"ramp_steps={ramp_steps} needs scale, the ratio of the learning rate at the "
                    "end of the ramp to the one at its start, got None"
                )
            scale = 1.0
        require_positive("scale", scale)
        if total_steps is not None:
            require_integer("total_steps", total_steps, least=1)
        self.scale = scale
        self.ramp_steps = ramp_steps
        self.ramp_from = ramp_from
        self.total_steps = total_steps
        # torch computes the first learning rate in here, so the settings come before it.
        super().__init__(optimizer, last_epoch)
        if total_steps is not None:
            warn_of_long_warmup(optimizer, total_steps)

    def factor_after_ramp(self, steps: int) -> float:
        """Return the fraction of the peak that is left `steps` ≥ 0 steps after the ramp."""
        return 1.0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Adopt the position and the settings of another schedule of this kind."""
        loaded, ours = state_dict.get("total_steps"), self.total_steps
        super().load_state_dict(state_dict)
        if loaded is not None and ours is not None and loaded != ours:
            warn_caller(
                f"the loaded schedule has {loaded} steps and this one was built for {ours}; it "
                f"continues with {loaded}. For a run of {ours} steps, set schedule.total_steps = "
                f"{ours} after loading, and adjust a weight decay that depends on it",
            )

    def get_lr(self) -> list[float | Tensor]:
        self._adopt_groups()
        step = self.last_epoch
        if step >= self.ramp_steps:
            multiplier = self.scale * self.factor_after_ramp(step - self.ramp_steps)
        elif self.ramp_from == "zero":
            multiplier = self.scale * ramp_from_zero(step, self.ramp_steps)
        else:
            multiplier = 1 + (self.scale - 1) * step / self.ramp_steps
        return [base * multiplier for base in self.base_lrs]

    def _adopt_groups(self) -> None:
        """Take in groups that `add_param_group` has added since: their learning rate is η."""
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:
            if "initial_lr" not in group:
                lr = group["lr"]
                group["initial_lr"] = lr.clone() if isinstance(lr, Tensor) else lr
            self.base_lrs.append(group["initial_lr"])


class LinearScaling(_RampedSchedule):
    """A constant learning rate proportional to the batch size: η·`batch_size`/`base_batch`.

    Args:
        optimizer: its learning rate η is the one tuned at `base_batch`.
        batch_size: examples in a step.
        base_batch: the batch size at which η was tuned.
        ramp_steps: the learning rate rises over this many steps first.
        ramp_from: "zero", or "base" for a ramp from the optimizer's learning rate to the
            scaled one.
        total_steps: optimizer steps of the whole run; if given, the schedule warns where the
            optimizer's warm-up covers most of it.
        last_epoch: as in torch, the step to continue after.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        batch_size: int,
        base_batch: int,
        ramp_steps: int = 0,
        ramp_from: RampStart = "base",
        total_steps: int | None = None,
        last_epoch: int = -1,
    ) -> None:
        require_integer("batch_size", batch_size, least=1)
        require_integer("base_batch", base_batch, least=1)
        scale = batch_size / base_batch
        super().__init__(optimizer, scale, ramp_steps, ramp_from, total_steps, last_epoch)


class _FallingToZero(_RampedSchedule):
    """Reaches 0 at `total_steps`."""

    total_steps: int

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_steps: int,
        scale: float | None = None,
        ramp_steps: int = 0,
        ramp_from: RampStart = "zero",
        last_epoch: int = -1,
    ) -> None:
        require_integer("total_steps", total_steps, least=1)
        super().__init__(optimizer, scale, ramp_steps, ramp_from, total_steps, last_epoch)

    def share_after_ramp(self, steps: int) -> float:
        """Return the share of the steps after the ramp that are done, from 0 to 1."""
        if self.last_epoch == self.total_steps + 1:
            warn_caller(
                f"the learning rate has been 0 since step {self.total_steps}, where this schedule "
                "ends: build it with the number of steps of the whole run",
            )
        return find_share(steps, self.total_steps - self.ramp_steps)


class PowerDecay(_FallingToZero):
    """A learning rate that falls to 0 at `total_steps`, as a power of the fraction that is left.

    Args:
        optimizer: its learning rate is the peak, unless `scale` is given.
        total_steps: optimizer steps of the whole run, the ramp included.
        power: 1 is a straight line; below 1 the rate stays high for longer and then falls faster.
        scale: the peak as a multiple of the optimizer's learning rate; None is 1.
        ramp_steps: the learning rate rises over this many steps first.
        ramp_from: "zero", or "base", which needs `scale`, for a ramp from the optimizer's
            learning rate.
        last_epoch: as in torch, the step to continue after.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_steps: int,
        power: float = POWER,
        scale: float | None = None,
        ramp_steps: int = 0,
        ramp_from: RampStart = "zero",
        last_epoch: int = -1,
    ) -> None:
        require_positive("power", power)
        self.power = power
        super().__init__(
            optimizer,
            total_steps=total_steps,
            scale=scale,
            ramp_steps=ramp_steps,
            ramp_from=ramp_from,
            last_epoch=last_epoch,
        )

    def factor_after_ramp(self, steps: int) -> float:
        return float((1.0 - self.share_after_ramp(steps)) ** self.power)


class LinearDecay(_FallingToZero):
    """A learning rate that falls linearly to 0 at `total_steps`.

    Args:
        optimizer: its learning rate is the peak, unless `scale` is given.
        total_steps: optimizer steps of the whole run, the ramp included.
        scale: the peak as a multiple of the optimizer's learning rate; None is 1.
        ramp_steps: the learning rate rises over this many steps first.
        ramp_from: "zero", or "base", which needs `scale`, for a ramp from the optimizer's
            learning rate.
        last_epoch: as in torch, the step to continue after.
    """

    def factor_after_ramp(self, steps: int) -> float:
        return 1.0 - self.share_after_ramp(steps)


class CosineDecay(_FallingToZero):
    """A learning rate that falls to 0 at `total_steps` along half a period of a cosine.

    The arguments are those of `LinearDecay`.
    """

    def factor_after_ramp(self, steps: int) -> float:
        return fall_as_cosine(self.share_after_ramp(steps))


class StepDecay(_RampedSchedule):
    """A learning rate multiplied by `factor` every `every_epochs` epochs.

    A ramp goes from the optimizer's learning rate to `scale` times it, and needs `scale`:
    `batch_size / base_batch` for linear scaling. `ramp_from="zero"` needs no `scale`.

    Args:
        optimizer: its learning rate is the one at the start.
        steps_per_epoch: optimizer steps per epoch.
        factor: what each drop multiplies the learning rate by.
        every_epochs: epochs between two drops.
        period_steps: the same in steps; overrides the epochs. It need not be whole:
            0.177 · total_steps makes the five drops of the paper's runs in a run of any length.
        scale: the learning rate after the ramp as a multiple of the optimizer's.
        ramp_steps: the learning rate rises over this many steps first.
        ramp_from: "zero", or "base" for a ramp from the optimizer's learning rate to `scale` times
            it.
        total_steps: optimizer steps of the whole run; if given, the schedule warns where the
            optimizer's warm-up covers most of it.
        last_epoch: as in torch, the step to continue after.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        steps_per_epoch: int | None = None,
        factor: float = STEP_FACTOR,
        every_epochs: int = STEP_EPOCHS,
        period_steps: float | None = None,
        scale: float | None = None,
        ramp_steps: int = 0,
        ramp_from: RampStart = "base",
        total_steps: int | None = None,
        last_epoch: int = -1,
    ) -> None:
        require_integer("every_epochs", every_epochs, least=1)
        require_positive("factor", factor)
        self.period: float
        if period_steps is not None:
            require_positive("period_steps", period_steps)
            self.period = period_steps
        elif steps_per_epoch is None:
            raise ValueError("StepDecay needs steps_per_epoch or period_steps, got None for both")
        else:
            require_integer("steps_per_epoch", steps_per_epoch, least=1)
            self.period = every_epochs * steps_per_epoch
        self.factor = factor
        super().__init__(optimizer, scale, ramp_steps, ramp_from, total_steps, last_epoch)

    def factor_after_ramp(self, steps: int) -> float:
        return fall_in_drops(self.factor, self.period, steps)


class InverseTime(_RampedSchedule):
    """A learning rate falling as 1/(1 + t/`decay_steps`): half its peak at t = `decay_steps`.

    For t far above `decay_steps` this is the paper's η ∝ 1/t, without its infinity at t = 0.

    Args:
        optimizer: its learning rate is the one at the start.
        decay_steps: steps after which half of the peak is left.
        scale: the learning rate after the ramp as a multiple of the optimizer's.
        ramp_steps: the learning rate rises over this many steps first.
        ramp_from: "zero", or "base" for a ramp from the optimizer's learning rate to `scale` times
            it.
        total_steps: optimizer steps of the whole run; if given, the schedule warns where the
            optimizer's warm-up covers most of it.
        last_epoch: as in torch, the step to continue after.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        decay_steps: float,
        scale: float | None = None,
        ramp_steps: int = 0,
        ramp_from: RampStart = "base",
        total_steps: int | None = None,
        last_epoch: int = -1,
    ) -> None:
        require_positive("decay_steps", decay_steps)
        self.decay_steps = decay_steps
        super().__init__(optimizer, scale, ramp_steps, ramp_from, total_steps, last_epoch)

    def factor_after_ramp(self, steps: int) -> float:
        return fall_inversely(self.decay_steps, steps)
