"""Preconditioners P: from gradients to the directions that the Neumann series sums.

The series A⁻¹ = Σ(I − A)ⁱ converges as fast as A is well conditioned. With a preconditioner it is
the series of PA, and the iteration stays what it is with P(g) in the place of g:

    g → ±g/grad_scale + λw → P → the one update

P = I is the paper. `Diagonal` divides by the root mean square of past gradients, as RMSProp and
Adam do. `Spectral` is in `spectral`; `Momentum` goes before it. Any object with the four parts of
`Preconditioner` can stand in for them.

A preconditioner fails where its arithmetic does: a gradient that is not finite gives a direction
that is not, unless the step is skipped; then its state is put back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from neumann.optim.checks import is_number, require

States = Sequence[dict[str, Tensor]]


@runtime_checkable
class Preconditioner(Protocol):
    """What stands between the gradients and the update.

    It keeps nothing itself: all it remembers is in the tensors that `create` makes for each
    parameter, which are saved, loaded and moved with the optimizer's state. One that has an
    attribute `before`, another preconditioner or None, is given that one's directions.
    """

    @property
    def name(self) -> str:
        """By which a checkpoint knows it: another than those of ours."""

    def elementwise(self, parameter: Tensor) -> bool:
        """Whether an element's direction depends on that element's gradients alone.

        If so, a sharded parameter's state is sharded like it, and `apply` sees its shards; if not,
        it sees the whole gradient, and every process keeps the whole state.
        """

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a new parameter, by name."""

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        """P(g) of each, as new tensors of the same shapes; the states are updated in place.

        The gradients are float32 or float64, on one device, and must not be changed. A state's
        tensors are written to, as with `mul_` and `copy_`, and never replaced. Complex gradients
        and states come as pairs of reals, in a last dimension of 2. Nothing here may wait for the
        device.
        """


PARTS = ("name", "elementwise", "create", "apply")


def is_preconditioner(given: Any) -> bool:
    """An object of such a class, not the class."""
    return isinstance(given, Preconditioner) and not isinstance(given, type)


def lacking(given: Any) -> str:
    """What an object has not that is wanted of a preconditioner, in words; nothing of a class."""
    missing = [] if isinstance(given, type) else [p for p in PARTS if not hasattr(given, p)]
    return f", which has no {', '.join(missing)}" if missing else ""


def check_decay(decay: Any) -> None:
    """Refuse what no moving mean can have."""
    require(is_number(decay) and 0 <= decay < 1, "decay", decay, "in [0, 1)")


def check_positive(name: str, value: Any) -> None:
    """Refuse what cannot be a size."""
    require(is_number(value) and value > 0, name, value, "a finite number above 0")


@dataclass(frozen=True)
class Diagonal:
    """g / (√v̂ + ε), with v̂ the bias-corrected moving mean of g²."""

    decay: float = 0.99  # of the mean
    eps: float = 1e-8
    scale: float = 0.2  # root mean square of a direction under steady gradients

    name = "diagonal"

    def __post_init__(self) -> None:
        check_decay(self.decay)
        check_positive("eps", self.eps)
        check_positive("scale", self.scale)

    def elementwise(self, parameter: Tensor) -> bool:
        """Always."""
        return True

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        """v = 0, in float32 at least: it shrinks by 1 % a step, which bfloat16 cannot tell."""
        wide = torch.promote_types(parameter.dtype, torch.float32)
        return {
            "second_moment": torch.zeros_like(parameter, dtype=wide, requires_grad=False),
            "seen": torch.zeros((), dtype=torch.float32, device=parameter.device),
        }

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        """As lists, in as few launches as torch offers."""
        g = list(gradients)
        moments = [state["second_moment"] for state in states]
        seen = [state["seen"] for state in states]
        torch._foreach_add_(seen, 1.0)
        torch._foreach_mul_(moments, self.decay)
        torch._foreach_addcmul_(moments, g, g, 1 - self.decay)
        # 1/√v̂ = √(1 − decayⁿ)/√v: the correction is a number for each tensor.
        corrections = (1 - self.decay ** torch.stack(seen)).sqrt()
        roots = torch._foreach_sqrt(moments)
        torch._foreach_div_(roots, list(corrections.unbind()))
        torch._foreach_add_(roots, self.eps)
        directions = torch._foreach_div(g, roots)
        if self.scale != 1:
            torch._foreach_mul_(directions, self.scale)
        return list(directions)


@dataclass(frozen=True)
class Momentum:
    """g + βb, with b ← βb + g: past gradients speak too, before a P that is not linear."""

    decay: float = 0.6  # β

    name = "momentum"

    def __post_init__(self) -> None:
        check_decay(self.decay)

    def elementwise(self, parameter: Tensor) -> bool:
        """Always."""
        return True

    def create(self, parameter: Tensor) -> dict[str, Tensor]:
        """b = 0, in float32 at least."""
        wide = torch.promote_types(parameter.dtype, torch.float32)
        return {"past": torch.zeros_like(parameter, dtype=wide, requires_grad=False)}

    def apply(self, gradients: Sequence[Tensor], states: States) -> list[Tensor]:
        """As lists."""
        g, past = list(gradients), [state["past"] for state in states]
        torch._foreach_mul_(past, self.decay)
        torch._foreach_add_(past, g)
        return list(torch._foreach_add(g, past, alpha=self.decay))
