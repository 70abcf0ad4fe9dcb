"""The update on NVIDIA GPUs as one pass over memory, through Triton.

`stepper` launches a step, `layout` and `device_tables` describe the tensors to the device,
`scalars_kernel` works out phase and coefficients there, and `update_kernel` is the arithmetic.
Importing this needs torch alone.

On ROCm torch reports devices of type "cuda" too. The kernels have never run there, so the backend
says that it is unavailable and the optimizer falls back to lists.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from neumann.optim.backends.base import Scalars
from neumann.optim.backends.cuda import stepper
from neumann.optim.options import StepOptions
from neumann.optim.tensors import Tensors


class TritonBackend:
    """Steps whose clock and coefficients never leave the GPU. See `base.Backend`."""

    name: ClassVar[str] = "triton"
    device_type: ClassVar[str | None] = "cuda"
    on_device: ClassVar[bool] = True
    unscales: ClassVar[bool] = True

    def __init__(self, device: torch.device) -> None:
        self.stepper = stepper.Stepper(device, rounding="stochastic")

    @classmethod
    def unavailable(cls, sums: int) -> str | None:
        """Why Triton cannot be used here; None if it can."""
        if sums > 1:
            return "its one sum cannot keep apart what is sharded in different ways"
        return stepper.unavailable()

    def prepare(
        self, groups: Sequence[Tensors], options: StepOptions, scalars: Scalars
    ) -> Callable[[], None]:
        """See `Backend.prepare`. Σδ² stays pending until the next step or `finish_distance`."""
        return self.stepper.prepare(
            groups,
            options,
            scalars.clock,
            scalars.distance_squared,
            grad_scale=scalars.grad_scale,
            found_inf=scalars.found_inf,
        )

    def measure(self, groups: Sequence[Tensors], sums: Tensor) -> None:
        self.stepper.measure(groups, sums)

    def finish_distance(self, distance_squared: Tensor) -> None:
        """Bring r² up to date, with the bits that the next step would see."""
        self.stepper.finish_distance(distance_squared)

    def forget(self) -> None:
        """Drop the sums that are pending."""
        self.stepper.forget()
