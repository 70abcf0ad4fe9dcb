"""What a backend is: one way to carry out the update of a step.

A backend receives the tensors of all groups and the scalars of the step. It ticks the clock, works
out phase and coefficients, updates w, m and δ, and leaves Σδ² for the next step's distance. A
parameter without a gradient stays put, but its m is reset at a reset and its δ counts in Σδ².

What can fail comes first, for all groups: a step that raises in `prepare` has changed nothing. The
clock ticks last.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from neumann.optim.options import StepOptions
from neumann.optim.tensors import Tensors


@dataclass(frozen=True)
class Scalars:
    """The scalars of a step. All are tensors, and those the step changes are changed in place."""

    clock: Tensor  # completed steps, int64; ticks
    distance_squared: Tensor  # r² before the step
    sums: Tensor  # receives Σδ²; the same tensor as r² unless parameters are sharded
    grad_scale: Tensor | None = None  # the gradients are divided by it
    found_inf: Tensor | None = None  # not zero: the step must change nothing


class Backend(Protocol):
    """The interface of a backend; `backends/__init__.py` lists those there are."""

    name: ClassVar[str]
    # The type of device it is for; None: any.
    device_type: ClassVar[str | None]
    # True: clock and r² live on the parameters' device, and a step never waits for the host.
    on_device: ClassVar[bool]
    # True: it divides by GradScaler's scale and skips steps that overflowed.
    unscales: ClassVar[bool]

    def __init__(self, device: torch.device) -> None: ...

    @classmethod
    def unavailable(cls, sums: int) -> str | None:
        """Why this backend cannot run here; None if it can.

        `sums` is the number of sums of squares that it would have to keep apart.
        """

    def prepare(
        self, groups: Sequence[Tensors], options: StepOptions, scalars: Scalars
    ) -> Callable[[], None]:
        """Get one step of all groups ready, without a change; the result takes the step."""

    def measure(self, groups: Sequence[Tensors], sums: Tensor) -> None:
        """Write Σδ² as it is now, added up in the order of a step, so the bits are the same."""

    def finish_distance(self, distance_squared: Tensor) -> None:
        """Bring r² up to date, if the last step left that for later."""

    def forget(self) -> None:
        """Drop what is pending: r² has been set from outside."""
