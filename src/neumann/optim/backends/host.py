"""Steps whose clock and coefficients are Python numbers: all backends but the CUDA one.

`HostBackend` works out a step's phase and coefficients; a subclass runs the update of one group.
Nothing is written before the updates of all groups are ready.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import is_
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
    sums_squares: ClassVar[bool] = False  # whether the prepared update returns Σδ²

    def __init__(self, device: torch.device) -> None:
        self._fitting: dict[int, list[list[Tensor]]] = {}  # of each group: w, m and δ that fit

    @classmethod
    def unavailable(cls, sums: int) -> str | None:
        return None

    @abstractmethod
    def prepare_update(
        self, index: int, tensors: Tensors, coefficients: Coefficients, seed: int
    ) -> Callable[[], float]:
        """Prepare the update of one group; every parameter in it has a gradient.

        Whatever can fail without a write belongs here: it runs for all groups before the first
        write.

        Args:
            index: the number of the group.
            tensors: those of this group.
            coefficients: those of this step.
            seed: for stochastic rounding; differs from step to step.

        Returns:
            A function that updates the group, and returns Σδ² of the new δ if the backend sums
            squares, else 0.
        """

    def prepare(
        self, groups: Sequence[Tensors], options: StepOptions, scalars: Scalars
    ) -> Callable[[], None]:
        """See `Backend.prepare`. A step to be skipped does not get here."""
        step = int(scalars.clock) + 1
        phase, t = options.timetable.place(step)
        # The force acts in the iterate phase alone.
        forced = options.has_forces and phase is Phase.ITERATE
        distance = take_root(scalars.distance_squared) if forced else None
        scale = 1.0 if scalars.grad_scale is None else 1 / float(scalars.grad_scale)
        momenta: list[float] = []
        updates: list[Callable[[], float]] = []
        for index, group in enumerate(groups):
            self._check_fit(index, group)
            momentum = momentum_at(t, group.options["momentum"])
            momenta.append(momentum)
            moving = group.with_gradient()
            if moving.weights:
                own = _compute_coefficients(group, options, phase, momentum, distance, scale)
                updates.append(self.prepare_update(index, moving, own, step))
            else:
                updates.append(_update_nothing)
        resting: list[Tensor] = []
        if phase is Phase.RESET:
            resting = [m for group in groups for m in group.without_gradient().iterates]

        def take_step() -> None:
            squares = [update() for update in updates]
            for iterate in resting:
                iterate.zero_()
            if any(group.offsets is not None for group in groups):
                self._add_up(groups, squares, scalars.sums)
            for group, momentum in zip(groups, momenta, strict=True):
                group.momentum.fill_(momentum)
            scalars.clock.add_(1)

        return take_step

    def _check_fit(self, index: int, group: Tensors) -> None:
        """Raise if m or δ does not fit its parameter; check again when a tensor was replaced."""
        kept = (group.weights, group.iterates, group.offsets or [])
        known = self._fitting.get(index)
        if known is not None and all(
            len(old) == len(new) and all(map(is_, old, new))
            for old, new in zip(known, kept, strict=True)
        ):
            return
        for number, (w, _, m, offset) in enumerate(group):
            for name, state in (("iterate", m), ("offset", offset)):
                if state is not None and not _fits(state, w):
                    raise ValueError(
                        f"the {name} of tensor {number} in group {index} must have its weight's "
                        f"shape {tuple(w.shape)} and device {w.device}, got {tuple(state.shape)} "
                        f"on {state.device}"
                    )
        self._fitting[index] = list(map(list, kept))

    def measure(self, groups: Sequence[Tensors], sums: Tensor) -> None:
        squares = [0.0] * len(groups)
        if self.sums_squares:
            for index, group in enumerate(groups):
                moving = group.with_gradient()
                if moving.weights:
                    squares[index] = self.prepare_update(index, moving, IDLE, 0)()
        self._add_up(groups, squares, sums)

    def finish_distance(self, distance_squared: Tensor) -> None:  # noqa: B027
        """r² is always up to date on the host."""

    def forget(self) -> None:  # noqa: B027
        """Nothing is ever pending on the host."""

    def _add_up(self, groups: Sequence[Tensors], squares: Sequence[float], sums: Tensor) -> None:
        """Write Σδ². What the updates have summed is not summed again."""
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


def _update_nothing() -> float:
    return 0.0


def _fits(state: Tensor, weight: Tensor) -> bool:
    same_kind = state.is_complex() == weight.is_complex()
    return state.shape == weight.shape and state.device == weight.device and same_kind


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
