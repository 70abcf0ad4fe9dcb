"""Momentum before a preconditioner that is not linear, such as the spectral one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neumann.optim.preconditioners.protocol import States, require_decay
from neumann.validation import require_positive


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


@dataclass(frozen=True)
class TwoMomenta:
    """g + fast·b + weight·s, with sums b ← fast·b + g and s ← slow·s + g of past gradients.

    Nesterov momentum with a slow sum beside it, which finds directions that many noisy gradients
    share. In the first steps it counts for little, so it needs neither a start nor a correction.
    """

    fast: float = 0.8
    slow: float = 0.98
    weight: float = 0.15  # of the slow sum

    name = "two momenta"
    # A step changes s by a fiftieth, which is too near to the 8 bits of bfloat16.
    narrow = Momentum.narrow

    def __post_init__(self) -> None:
        require_decay(self.fast, "fast")
        require_decay(self.slow, "slow")
        require_positive("weight", self.weight)

    def elementwise(self, parameter: Tensor) -> bool:
        return True

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        """b = s = 0, in float32 at least; the optimizer may narrow b."""
        state = Momentum(self.fast).create(parameter)
        return {**state, "slow_past": torch.zeros_like(state["past"])}

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        directions = Momentum(self.fast).apply(gradients, states)
        slow = [state["slow_past"] for state in states]
        torch._foreach_mul_(slow, self.slow)
        torch._foreach_add_(slow, list(gradients))
        torch._foreach_add_(directions, slow, alpha=self.weight)
        return directions
