"""Momentum before a preconditioner that is not linear, such as the spectral one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neumann.optim.preconditioners.cuda.elementwise import apply_momentum, split_by_size
from neumann.optim.preconditioners.protocol import States, require_decay
from neumann.validation import is_count, is_number, require


@dataclass(frozen=True)
class Momentum:
    """g + decay·b with b ← decay·b + g, as in Nesterov momentum.

    Muon calls the decay β; here β is the strength of the repulsion.
    """

    decay: float = 0.6  # of past gradients in each step

    name = "momentum"

    @property
    def narrow(self) -> tuple[str, ...]:
        """b may be in bfloat16 unless it changes slowly: the noise of its roundings adds up.

        Each errs by about 0.23 % of b, all by 0.23 % / √(1 − decay²): 0.4 % at 0.8, 1.6 % at 0.99.
        """
        return ("past",) if self.decay <= 0.9 else ()

    def __post_init__(self) -> None:
        require_decay(self.decay)

    def elementwise(self, parameter: Tensor) -> bool:
        return True

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        """b = 0, in float32 at least; the optimizer may narrow it."""
        wide = torch.promote_types(parameter.dtype, torch.float32)
        return {"past": torch.zeros_like(parameter, dtype=wide, requires_grad=False)}

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        past = [state["past"] for state in states]
        large, rest = split_by_size(gradients, past)
        found = {i: apply_momentum(gradients[i], past[i], self.decay) for i in large}
        if rest:
            g, b = [gradients[i] for i in rest], [past[i] for i in rest]
            torch._foreach_mul_(b, self.decay)
            torch._foreach_add_(b, g)
            found.update(zip(rest, torch._foreach_add(g, b, alpha=self.decay), strict=True))
        return [found[i] for i in range(len(gradients))]


@dataclass(frozen=True)
class SlowMomentum:
    """(1 − share)·f + share·s/(1 − decay): f is what `Momentum` gives, s a slow mean of gradients.

    s is a bias-corrected moving mean of the gradients after the first `start` steps. During these
    steps this is `Momentum(decay)`. If gradients do not change, both terms have the same size.
    """

    decay: float = 0.6  # of past gradients in f
    slow: float = 0.98  # of past gradients in s
    share: float = 0.6  # of s in the direction
    start: int = 0  # steps without s

    name = "slow momentum"
    # Not s, in which the noise of fifty roundings or more would add up.
    narrow = Momentum.narrow

    def __post_init__(self) -> None:
        require_decay(self.decay)
        require(is_number(self.slow) and 0 <= self.slow < 1, "slow", self.slow, "in [0, 1)")
        require(is_number(self.share) and 0 <= self.share <= 1, "share", self.share, "in [0, 1]")
        good = is_count(self.start) and self.start >= 0
        require(good, "start", self.start, "an integer of at least 0")

    def elementwise(self, parameter: Tensor) -> bool:
        return True

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        fast = Momentum(self.decay).create(parameter)
        seen = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {**fast, "slow": torch.zeros_like(fast["past"]), "slow_seen": seen}

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        found = Momentum(self.decay).apply(gradients, states)
        slow, seen = ([state[key] for state in states] for key in ("slow", "slow_seen"))
        torch._foreach_add_(seen, 1.0)
        count = torch.stack(seen).to(found[0].dtype) - self.start  # of gradients in s
        # Until it begins, s forgets everything. Nothing here waits for the device.
        torch._foreach_mul_(slow, list((self.slow * (count > 1)).unbind()))
        torch._foreach_add_(slow, list(gradients), alpha=1 - self.slow)
        share = self.share * (count > 0)
        size = (1 - self.slow ** count.clamp(min=1)) * (1 - self.decay)
        torch._foreach_mul_(found, list((1 - share).unbind()))
        mixed = torch._foreach_mul(slow, list((share / size).unbind()))
        torch._foreach_add_(found, mixed)
        return found
