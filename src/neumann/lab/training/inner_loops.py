"""Steps that use one mini-batch several times: Algorithm 1 (`idealized`), and `cg`.

All evaluations of a step see the same function: the same augmented examples, in the same
micro-batches, over which BatchNorm normalizes, and the same dropout masks. (The products of `cg`
have masks of their own, the same for all products of a step.) The running statistics of BatchNorm
are updated once a step, at the weights themselves and not at displaced ones.

`counts` says what all steps together have computed: gradients of a whole mini-batch, and for `cg`
products with its curvature, each of which costs about two gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from neumann.lab.errors import UsageError, shorten
from neumann.lab.optimizers.newton_cg import CURVATURES, TruncatedNewton
from neumann.lab.training.batchnorm_layers import get_statistics, set_statistics
from neumann.lab.training.gradients import (
    CapturedGradientComputer,
    Context,
    GradientComputer,
    Loss,
    Pieces,
)
from neumann.lab.training.random_state import get_rng_state, set_rng_state
from neumann.spectrum import NonFiniteProduct, Objective
from neumann.theory.idealized import IdealizedNeumann


@dataclass(eq=False)
class InnerLoop:
    """Takes the steps of an optimizer that evaluates its mini-batch several times."""

    optimizer: Optimizer
    gradients: GradientComputer | CapturedGradientComputer
    model: nn.Module
    loss: Loss
    autocast: Context
    counts: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def suits(optimizer: Optimizer) -> bool:
        return isinstance(optimizer, IdealizedNeumann | TruncatedNewton)

    def __post_init__(self) -> None:
        self.counts["gradients"] = 0
        if isinstance(self.optimizer, TruncatedNewton):
            self.counts["products"] = 0

    def take_step(self, pieces: Pieces) -> Tensor:
        """Take a step and return the loss at its start, on the device."""
        generators = get_rng_state()
        evaluations = 0
        statistics: list[Tensor] = []

        def evaluate() -> Tensor:
            nonlocal evaluations
            if evaluations == 1:
                statistics.extend(buffer.clone() for buffer in get_statistics(self.model))
            if evaluations:
                set_rng_state(generators)
            evaluations += 1
            return self.gradients.compute(pieces).clone()  # a CUDA graph overwrites it

        if isinstance(self.optimizer, TruncatedNewton):
            loss = self._solve(self.optimizer, evaluate, pieces)
        else:
            optimizer: Any = self.optimizer
            loss = optimizer.step(evaluate)
        if statistics:
            set_statistics(self.model, statistics)
        self.counts["gradients"] += evaluations
        return loss

    def _solve(
        self, optimizer: TruncatedNewton, evaluate: Callable[[], Tensor], pieces: Pieces
    ) -> Tensor:
        def forward(model: nn.Module, batch: Any) -> Any:
            with self.autocast():
                return model(batch[0])

        def compute_loss(output: Any, batch: Any) -> Tensor:
            with self.autocast():
                return self.loss(output, batch[1])

        several = distributed.is_initialized() and distributed.get_world_size() > 1
        (group,) = optimizer.param_groups
        try:
            curvature = CURVATURES[group["curvature"]](
                self.model,
                Objective(forward, compute_loss),
                loader=pieces,
                seed=self.counts["gradients"],
                process_group=distributed.group.WORLD if several else None,
            )
            loss: Tensor = optimizer.step(evaluate, curvature)
        except NonFiniteProduct:
            # The run ends here, as it does with other optimizers at weights without a loss.
            return torch.full((), torch.nan, device=pieces[0][0].device)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError) as error:
            raise UsageError(f"--opt cg: {shorten(error, 400)}") from error
        assert optimizer.last is not None
        self.counts["products"] += optimizer.last.products
        return loss
