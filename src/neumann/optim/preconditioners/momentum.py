"""Momentum before a preconditioner that is not linear, such as the spectral one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neumann.optim.preconditioners.protocol import States, require_decay


@dataclass(frozen=True)
class Momentum:
    """g + decay·b with b ← decay·b + g, as in Nesterov momentum.

    Muon calls the decay β; here β is the strength of the repulsion.
    """

    decay: float = 0.6  # of past gradients in each step

    name = "momentum"
    # b changes by a twentieth or more in each step: rounding it to 8 bits leaves no dead band.
    narrow = ("past",)

    def __post_init__(self) -> None:
        require_decay(self.decay)

    def elementwise(self, parameter: Tensor) -> bool:
        return True

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        """b = 0, in float32 at least; the optimizer may narrow it."""
        wide = torch.promote_types(parameter.dtype, torch.float32)
        return {"past": torch.zeros_like(parameter, dtype=wide, requires_grad=False)}

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        g, past = list(gradients), [state["past"] for state in states]
        torch._foreach_mul_(past, self.decay)
        torch._foreach_add_(past, g)
        return list(torch._foreach_add(g, past, alpha=self.decay))
