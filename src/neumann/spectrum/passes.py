"""Passes through a model that all start from the same place, and what the first of them show.

Before each pass the generators are seeded and the buffers put back, so that all products of a
session belong to one matrix. While `watching`, in the first product of a session, a pass also shows
whether it drew random numbers and whether the loss is finite. That is kept on the device until
`check` asks, once; weights and data are the same in all products, so one look is enough.
"""

from typing import Any

import torch
from torch import Tensor

from neumann.spectrum.batches import Piece, moved
from neumann.spectrum.operators import NonFiniteProduct
from neumann.spectrum.state import Buffers, generator_states, reseed


class Passes:
    """What the passes of one operator share; only for use inside `held`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.watching = False
        self.drew = False  # random numbers, in this session
        self._buffers: Buffers | None = None
        self._finite: Tensor | None = None  # of all losses so far
        self._generators: list[Any] = []

    def begin(self, buffers: Buffers) -> None:
        """A session; `buffers` are those of the model at its start."""
        self._buffers, self._finite = buffers, None
        self.watching, self.drew = True, False

    def end(self) -> None:
        self._buffers, self._finite, self._generators = None, None, []
        self.watching = False

    def start(self, piece: Piece, seed: int) -> Any:
        """The data on the device; generators and buffers are where they always are for them."""
        data = moved(piece.data, self.device)
        reseed(seed, self.device)
        if self._buffers is not None:
            self._buffers.restore()
        if self.watching:
            self._generators = generator_states(self.device)
        return data

    def finish(self, loss: Tensor) -> Tensor:
        """The loss of a pass, which must depend on the weights."""
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ValueError(
                "the loss does not depend on any trainable parameter: the model or the loss "
                "detaches its outputs, runs under no_grad or in reentrant checkpoints, or takes no "
                "derivative (an argmax)"
            )
        if self.watching:
            finite = torch.isfinite(loss.detach())
            self._finite = finite if self._finite is None else finite & self._finite
            self.drew = self.drew or generator_states(self.device) != self._generators
        return loss

    def check(self, matrix: str) -> None:
        """Raise if a loss was not finite; waits for the device."""
        if self._finite is not None and not self._finite:
            raise NonFiniteProduct(
                "the loss is not finite: it is NaN or infinity on these data at these weights, "
                f"so there is no {matrix}"
            )
