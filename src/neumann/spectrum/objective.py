"""The loss of a model on a batch, in two parts, since Gauss–Newton needs them apart.

    loss(w) = loss(forward(model, batch), batch)        the mean over the examples of the batch

For batches that are pairs of inputs and targets a plain function of outputs and targets will do,
such as `torch.nn.functional.cross_entropy`; any other batch needs an `Objective`. A model that
returns its own loss is
`Objective(lambda model, batch: model(**batch).loss, lambda output, batch: output)`.

How it fails: a loss that is a sum, or a mean over something else than the examples (tokens that are
not padding, say), is weighted wrongly over batches of different sizes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Objective:
    """What the model returns for a batch, and the scalar loss of that."""

    forward: Callable[[nn.Module, Any], Any]
    loss: Callable[[Any, Any], Tensor]


Loss = Objective | Callable[[Any, Any], Tensor]


def as_objective(loss: Loss) -> Objective:
    """An objective as it is, or one for pairs (inputs, targets) from a function of both."""
    if isinstance(loss, Objective):
        return loss
    if not callable(loss):
        raise TypeError(
            "loss must be an Objective, or a function of outputs and targets that returns their "
            f"mean loss, got {loss!r}"
        )
    criterion = loss

    def of_pair(output: Any, batch: Any) -> Tensor:
        return criterion(output, batch[1])

    return Objective(lambda model, batch: model(batch[0]), of_pair)


def scalar(loss: Tensor) -> Tensor:
    """The loss, if it is one number."""
    if not isinstance(loss, Tensor) or loss.shape != ():
        given = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            "loss must return a scalar, the mean over the examples of the batch, got "
            f"{given}; a criterion with reduction='none' needs .mean()"
        )
    return loss


class Composed(nn.Module):
    """Model and objective as one module from a batch to its loss, for functional calls."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, batch: Any) -> Tensor:
        return scalar(self.objective.loss(self.objective.forward(self.model, batch), batch))
