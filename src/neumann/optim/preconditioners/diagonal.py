"""The diagonal preconditioner: divide by the root mean square of past gradients, as Adam does."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neumann.optim.preconditioners.cuda.elementwise import apply_diagonal, split_by_size
from neumann.optim.preconditioners.protocol import (
    Preconditioner,
    States,
    is_preconditioner,
    require_decay,
)
from neumann.validation import require_positive


@dataclass(frozen=True)
class Diagonal:
    """g / (√v̂ + ε), where v̂ is the bias-corrected moving mean of g²."""

    decay: float = 0.99  # of the moving mean
    eps: float = 1e-8  # ε
    scale: float = 0.2  # root mean square of a direction under steady gradients
    before: Preconditioner | None = None  # a preconditioner applied to the gradients first

    name = "diagonal"

    def __post_init__(self) -> None:
        require_decay(self.decay)
        require_positive("eps", self.eps)
        require_positive("scale", self.scale)
        if self.before is not None and not is_preconditioner(self.before):
            raise ValueError(f"before must be a Preconditioner, got {self.before!r}")

    def __repr__(self) -> str:
        """A checkpoint names P by this; `before` is left out where there is none, as in 0.1."""
        before = "" if self.before is None else f", before={self.before!r}"
        return f"Diagonal(decay={self.decay}, eps={self.eps}, scale={self.scale}{before})"

    def elementwise(self, parameter: Tensor) -> bool:
        return True

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        """v = 0, in float32 at least: it shrinks by 1 % a step, too little for bfloat16."""
        wide = torch.promote_types(parameter.dtype, torch.float32)
        return {
            "second_moment": torch.zeros_like(parameter, dtype=wide, requires_grad=False),
            "seen": torch.zeros((), dtype=torch.float32, device=parameter.device),
        }

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        moments = [state["second_moment"] for state in states]
        seen = [state["seen"] for state in states]
        torch._foreach_add_(seen, 1.0)
        # 1/√v̂ = √(1 − decayⁿ)/√v: the correction is one number per tensor.
        corrections = (1 - self.decay ** torch.stack(seen)).sqrt().unbind()
        large, rest = split_by_size(gradients, moments)
        numbers = self.decay, self.eps, self.scale
        found = {
            i: apply_diagonal(gradients[i], moments[i], corrections[i], *numbers) for i in large
        }
        if rest:
            g, v = [gradients[i] for i in rest], [moments[i] for i in rest]
            torch._foreach_mul_(v, self.decay)
            torch._foreach_addcmul_(v, g, g, 1 - self.decay)
            roots = torch._foreach_sqrt(v)
            torch._foreach_div_(roots, [corrections[i] for i in rest])
            torch._foreach_add_(roots, self.eps)
            directions = torch._foreach_div(g, roots)
            if self.scale != 1:
                torch._foreach_mul_(directions, self.scale)
            found.update(zip(rest, directions, strict=True))
        return [found[i] for i in range(len(gradients))]
