"""The tensors of a step: one container that travels from the parameter groups to the kernel."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from neumann.optim.options import GroupOptions


@dataclass(frozen=True)
class Tensors:
    """One group's share of a step: aligned lists with an entry for each parameter.

    The same container travels from the parameter groups through the preconditioner to the kernel.
    """

    weights: list[Tensor] = field(default_factory=list)  # w: what this process holds of it
    gradients: list[Tensor | None] = field(default_factory=list)  # g, or P(g)
    iterates: list[Tensor] = field(default_factory=list)  # m
    offsets: list[Tensor] | None = None  # δ; None: without forces it is not kept
    parameters: list[Tensor] = field(default_factory=list)  # in the user's groups
    states: list[dict[str, Any]] = field(default_factory=list)  # of these parameters
    options: "GroupOptions" = None  # type: ignore[assignment]  # a step always has them
    momentum: Tensor = None  # type: ignore[assignment]  # receives μ of the step
    sum_number: int = 0  # which sum of squares these offsets go into: see `distributed`

    def replace_gradients(self, gradients: list[Tensor | None], options: Any = None) -> "Tensors":
        """The same tensors with other gradients and, if given, other options."""
        # Spelled out, because torch 2.6 cannot trace dataclasses.replace.
        return Tensors(
            self.weights,
            gradients,
            self.iterates,
            self.offsets,
            self.parameters,
            self.states,
            self.options if options is None else options,
            self.momentum,
            self.sum_number,
        )

    def select(self, chosen: Sequence[bool], sum_number: int | None = None) -> "Tensors":
        """The entries where `chosen` is true."""
        return Tensors(
            list(compress(self.weights, chosen)),
            list(compress(self.gradients, chosen)),
            list(compress(self.iterates, chosen)),
            None if self.offsets is None else list(compress(self.offsets, chosen)),
            list(compress(self.parameters, chosen)),
            list(compress(self.states, chosen)),
            self.options,
            self.momentum,
            self.sum_number if sum_number is None else sum_number,
        )

    def with_gradient(self) -> "Tensors":
        """The parameters that have a gradient."""
        if all(g is not None for g in self.gradients):
            return self
        return self.select([g is not None for g in self.gradients])

    def without_gradient(self) -> "Tensors":
        """The parameters that have none: they keep w, m and δ, but a reset sets m to 0."""
        return self.select([g is None for g in self.gradients])

    def find_frozen(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters that have no gradient and require none, each with its m."""
        if all(g is not None for g in self.gradients):
            return []
        resting = self.without_gradient()
        pairs = zip(resting.parameters, resting.iterates, strict=True)
        return [(p, m) for p, m in pairs if not p.requires_grad]

    def __iter__(self) -> Iterator[tuple[Tensor, Any, Tensor, Tensor | None]]:
        """w, g, m and δ of each parameter."""
        offsets = self.offsets if self.offsets is not None else [None] * len(self.weights)
        return zip(self.weights, self.gradients, self.iterates, offsets, strict=True)
