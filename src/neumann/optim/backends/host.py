"""Steps whose clock and coefficients are Python numbers: all backends but the CUDA one.

`HostBackend` works out a step's phase and coefficients; a subclass runs the update of one group.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from neumann.optim.backends.base import Scalars
from neumann.optim.distance import distance_squared, force, take_root
from neumann.optim.options import StepOptions
from neumann.optim.phases import IDLE, Coefficients, Phase, choose_coefficients, momentum_at
from neumann.optim.tensors import Tensors


class HostBackend(ABC):
    """A backend that computes its coefficients on the host. See `base.Backend`."""

    name: ClassVar[str]
    device_type: ClassVar[str | None] = None
    on_device: ClassVar[bool] = False
    unscales: ClassVar[bool] = False
    sums_squares: ClassVar[bool] = False  # whether `update` returns Σδ²

    def __init__(self, device: torch.device) -> None:  # noqa: B027
        """Nothing depends on the device."""

    @classmethod
    def unavailable(cls, sums: int) -> str | None:
        return None

    @abstractmethod
    def update(self, index: int, tensors: Tensors, coefficients: Coefficients, seed: int) -> float:
        """Update one group, all of whose parameters have a gradient; index is its number.

        Returns Σδ² of the new δ if the backend sums squares, else 0.
        """

    def step(self, groups: Sequence[Tensors], options: StepOptions, scalars: Scalars) -> None:
        """See `Backend.step`. A step to be skipped does not get here."""
        scalars.clock.add_(1)
        step = int(scalars.clock)
        phase, t = options.timetable.place(step)
        # The force acts in the iterate phase alone.
        forced = options.has_forces and phase is Phase.ITERATE
        distance = take_root(scalars.distance_squared) if forced else None
        scale = 1.0 if scalars.grad_scale is None else 1 / float(scalars.grad_scale)
        squares = []
        for index, group in enumerate(groups):
            momentum = momentum_at(t, group.options["momentum"])
            group.momentum.fill_(momentum)
            moving = group.with_gradient()
            squared = 0.0
            if moving.weights:
                own = _compute_coefficients(group, options, phase, momentum, distance, scale)
                squared = self.update(index, moving, own, step)
            squares.append(squared)
        if phase is Phase.RESET:
            resting = (group.without_gradient().iterates for group in groups)
            for iterate in chain.from_iterable(resting):
                iterate.zero_()
        if options.has_forces:
            self._add_up(groups, squares, scalars.sums)

    def measure(self, groups: Sequence[Tensors], sums: Tensor) -> None:
        squares = [0.0] * len(groups)
        if self.sums_squares:
            for index, group in enumerate(groups):
                moving = group.with_gradient()
                if moving.weights:
                    squares[index] = self.update(index, moving, IDLE, 0)
        self._add_up(groups, squares, sums)

    def finish_distance(self, distance_squared: Tensor) -> None:  # noqa: B027
        """r² is always up to date on the host."""

    def forget(self) -> None:  # noqa: B027
        """Nothing is ever pending on the host."""

    def _add_up(self, groups: Sequence[Tensors], squares: Sequence[float], sums: Tensor) -> None:
        """Write Σδ². What `update` has summed is not summed again."""
        totals = []
        for number in range(sums.numel()):
            offsets: list[Tensor] = []
            summed = 0.0
            for group, squared in zip(groups, squares, strict=True):
                if group.sum_number == number:
                    left = group.without_gradient() if self.sums_squares else group
                    offsets += left.offsets or ()
                    summed += squared
            if torch.is_grad_enabled():
                offsets = [o.clone() for o in offsets]  # the next step writes the originals
            totals.append(distance_squared(offsets, sums.device) + summed)
        sums.copy_(torch.stack(totals).reshape(sums.shape))


def _compute_coefficients(
    group: Tensors,
    options: StepOptions,
    phase: Phase,
    momentum: float,
    distance: Tensor | None,
    scale: float,
) -> Coefficients:
    """The coefficients of one group."""
    own = group.options
    lr: Any = own["lr"] if own["differentiable"] else float(own["lr"])
    decoupled = own["decoupled_weight_decay"]
    return choose_coefficients(
        phase,
        lr,
        momentum,
        options.average,
        own["weight_decay"] if decoupled else 0.0,
        force=0.0 if distance is None else force(distance, lr, momentum, options),
        weight_decay=0.0 if decoupled else own["weight_decay"],
        scale=-scale if own["maximize"] else scale,
    )
