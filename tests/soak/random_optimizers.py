"""Random optimizers: options, dtypes, shapes, groups of parameters, and gradients for them."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neumann import Neumann

BACKENDS: dict[str, dict[str, Any]] = {
    "reference": {"foreach": False},
    "lists": {"foreach": True},
    "unfused": {"fused": False},
    "numba": {"fused": True},
    "default": {},
}
DTYPES = {torch.float64: 12, torch.float32: 3, torch.bfloat16: 2, torch.complex128: 2}
SHAPES = [(), (1,), (3,), (7,), (16,), (4, 5), (2, 3, 2), (0,), (33,)]
LONG = (9001,)  # longer than a block of the kernel


@dataclass
class Kind:
    """A group of parameters; some of them are frozen."""

    shapes: list[tuple[int, ...]]
    frozen: list[bool]
    transposed: list[bool]
    options: dict[str, Any]


class Recipe:
    """Draws what a sequence needs, and builds optimizers from it: the same one again if asked."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.generator = torch.Generator().manual_seed(chance.getrandbits(40))
        self.dtype = chance.choices(list(DTYPES), list(DTYPES.values()))[0]
        self.backend = chance.choice(list(BACKENDS))
        self.precondition = chance.choices([None, "diagonal", "spectral"], [8, 2, 1])[0]
        self.named = chance.random() < 0.3
        self.common = self.draw_common()
        self._created = 0

    def draw_common(self) -> dict[str, Any]:
        """Options that all groups share."""
        chance = self.chance
        bounded = chance.random() < 0.8
        # Without its bound the repulsion amplifies rounding without limit.
        repulsive = chance.choice((0.0, 1e-5, 1e-3, 0.02)) if bounded else 1e-9
        return {
            "warmup_steps": chance.choice((0, 0, 1, 3, 8)),
            "reset_steps": chance.choice((0, 2, 3, 5, 9)),
            "reset_growth": chance.choice((1.0, 1.5, 2.0)),
            "cubic": chance.choice((0.0, 1e-7, 0.01)),
            "repulsive": chance.choice((0.0, repulsive)),
            "average": chance.choice((0.99, 0.9, 0.5, 0.0)),
            "bounded": bounded,
            "variables": chance.choice(("tensors", "tensors", "elements", 7)),
            "skip_nonfinite": chance.random() < 0.3,
            "state_dtype": self._draw_state_dtype(),
            **BACKENDS[self.backend],
        }

    def _draw_state_dtype(self) -> torch.dtype | None:
        if self.dtype is torch.float64 or self.dtype.is_complex:
            return None
        return self.chance.choice((None, torch.float32, torch.bfloat16, torch.float64))

    def draw_own(self) -> dict[str, Any]:
        """Options that each group has for itself."""
        chance = self.chance
        return {
            "lr": chance.choice((0.3, 0.1, 0.03, 0.01)),
            "momentum": chance.choice((0.9, 0.9, 0.6, 0.0, 0.97)),
            "weight_decay": chance.choice((0.0, 0.0, 0.01, 0.1)),
            "decoupled_weight_decay": chance.random() < 0.5,
            "maximize": chance.random() < 0.2,
            "precondition": self.precondition if chance.random() < 0.7 else None,
        }

    def draw_kind(self) -> Kind:
        chance = self.chance
        shapes = [chance.choice(SHAPES) for _ in range(chance.randint(1, 4))]
        if chance.random() < 0.05:
            shapes.append(LONG)
        frozen = [chance.random() < 0.15 for _ in shapes]
        transposed = [len(shape) == 2 and chance.random() < 0.3 for shape in shapes]
        return Kind(shapes, frozen, transposed, self.draw_own())

    def build(self, kinds: list[Kind], **changed: Any) -> Neumann:
        self._created = 0
        groups = [{"params": self.make_parameters(kind), **kind.options} for kind in kinds]
        return Neumann(groups, lr=0.1, **{**self.common, **changed})

    def make_parameters(self, kind: Kind) -> list[Any]:
        """New parameters, or pairs of a name and a parameter."""
        parameters = [
            self._make_parameter(*of)
            for of in zip(kind.shapes, kind.frozen, kind.transposed, strict=True)
        ]
        if not self.named:
            return parameters
        first = self._created
        self._created += len(parameters)
        return [(f"p{number}", p) for number, p in enumerate(parameters, first)]

    def _make_parameter(
        self, shape: tuple[int, ...], frozen: bool, transposed: bool
    ) -> nn.Parameter:
        w = torch.randn(shape, generator=self.generator, dtype=torch.float64) * 2
        if self.dtype.is_complex:
            w = torch.complex(w, torch.randn(shape, generator=self.generator).double())
        w = w.to(self.dtype)
        w = w.t().contiguous().t() if transposed else w
        return nn.Parameter(w, requires_grad=not frozen)

    def draw_gradients(self, optimizer: Neumann) -> list[list[Tensor | None]]:
        """For each group, the gradients of its parameters; some have none."""
        return [
            [self._draw_gradient(optimizer, group, p) for p in group["params"]]
            for group in optimizer.param_groups
        ]

    def _draw_gradient(self, optimizer: Neumann, group: dict[str, Any], p: Tensor) -> Tensor | None:
        # torch's optimizers use the gradient of a frozen parameter if one was left behind.
        if self.chance.random() < (0.9 if not p.requires_grad else 0.12):
            return None
        g = torch.randn(p.shape, generator=self.generator, dtype=torch.float64)
        if p.is_complex():
            g = torch.complex(g, torch.randn(p.shape, generator=self.generator).double())
        # A quadratic's gradient plus noise: weights stay of order one.
        sign = -1.0 if group["maximize"] else 1.0
        training = optimizer.state.get(p, {}).get("weights", p).detach()
        return (0.3 * sign * training.to(g.dtype) + g).to(p.dtype)
