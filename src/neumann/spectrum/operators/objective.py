"""The loss of a model on a batch, split in two because Gauss–Newton needs both parts.

    loss(w) = loss(forward(model, batch), batch)        the mean over the examples of the batch

How it fails: a loss that is a sum, or a mean over anything but the examples (say, over tokens that
are not padding), gets the wrong weights when batches differ in size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Objective:
    """What the model returns for a batch, and the scalar loss of that.

    For batches that are pairs of inputs and targets a plain function of outputs and targets is
    enough, such as `torch.nn.functional.cross_entropy`. For a model that returns its own loss use
    `Objective(lambda model, batch: model(**batch).loss, lambda output, batch: output)`.
    """

    forward: Callable[[nn.Module, Any], Any]  # what the model returns for a batch
    loss: Callable[[Any, Any], Tensor]  # the scalar loss of that and the batch


Loss = Objective | Callable[[Any, Any], Tensor]


def as_objective(loss: Loss) -> Objective:
    """Turn a function of outputs and targets into an objective for pairs (inputs, targets)."""
    if isinstance(loss, Objective):
        return loss
    if not callable(loss):
        raise TypeError(
            "loss must be an Objective, or a function of outputs and targets that returns their "
            f"mean loss, got {loss!r}"
        )
    return Objective(
        lambda model, batch: model(batch[0]), lambda output, batch: loss(output, batch[1])
    )


def check_scalar(loss: Tensor) -> Tensor:
    """Return the loss; raise ValueError unless it is a single number."""
    if not isinstance(loss, Tensor) or loss.shape != ():
        given = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            "loss must return a scalar, the mean over the examples of the batch, got "
            f"{given}; a criterion with reduction='none' needs .mean()"
        )
    return loss


class LossModule(nn.Module):
    """Model and objective as one module from a batch to its loss, for functional calls."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, batch: Any) -> Tensor:
        return check_scalar(self.objective.loss(self.objective.forward(self.model, batch), batch))
