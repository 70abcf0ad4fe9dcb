"""How a run ends."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Summary:
    """A run that came to its end."""

    accuracy: float  # %, at the evaluation weights after the last step
    accuracy_recalibrated: float | None  # %, with BatchNorm statistics gathered at those weights
    loss: float  # nats, on the evaluated split
    train_loss: float  # nats, mean over the last epoch
    steps: int
    seconds: float  # of training alone
    compile_seconds: float  # of the first steps, in which everything is compiled
    steps_to_target: int | None
    epochs_to_target: float | None


class Diverged(RuntimeError):
    """The loss was not finite. The run's summary says so too, and has no accuracy."""

    def __init__(self, step: int, lr: float, checkpoint: str | None) -> None:
        self.step, self.lr, self.checkpoint = step, lr, checkpoint
        where = f"the last good checkpoint is {checkpoint}" if checkpoint else "no checkpoint"
        super().__init__(f"the loss was not finite in step {step} at lr {lr:g}; {where}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.step, self.lr, self.checkpoint)

    def as_dict(self) -> dict[str, Any]:
        """What the summary keeps of it."""
        return {"diverged": {"step": self.step, "lr": self.lr, "checkpoint": self.checkpoint}}
