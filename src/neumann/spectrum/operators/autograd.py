"""What matrices by automatic differentiation share: one product per piece, and kept graphs."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from neumann.spectrum.operators.loss_curvature import CurvatureOperator
from neumann.spectrum.operators.objective import Loss


class AutogradOperator(CurvatureOperator):
    """A sum over pieces of the data; graphs in `_graphs` are dropped with the session."""

    def __init__(self, model: nn.Module, loss: Loss, **options: Any) -> None:
        super().__init__(model, loss, **options)
        self._graphs: dict[int, Any] = {}  # for the piece of this index
        self._checked_graph = False

    @abstractmethod
    def _piece_product(self, index: int, vector: Tensor) -> Tensor:
        """Return the product of this piece's matrix, as a tensor we may write to."""

    def _local_product(self, vector: Tensor) -> Tensor:
        parts = (
            self._piece_product(index, vector).mul_(piece.examples / self.examples)
            for index, piece in enumerate(self.pieces)
        )
        total = next(parts)
        for part in parts:
            total.add_(part)
        return total

    @contextmanager
    def _environment(self) -> Iterator[None]:
        """Use only kernels that can be differentiated twice."""
        recurrent = any(isinstance(module, nn.RNNBase) for module in self.model.modules())
        plain = torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext()
        with sdpa_kernel(SDPBackend.MATH), plain:
            yield

    def _release(self) -> None:
        self._graphs.clear()

    def _copy_in_float64(self) -> Self:
        twin = super()._copy_in_float64()
        twin._graphs = {}
        return twin

    def _check_twice_differentiable(self, gradients: Sequence[Tensor]) -> None:
        """Raise RuntimeError if the graph contains a function that is differentiable only once.

        Such a function puts a node into the graph that raises when reached. But a gradient with
        respect to given inputs only walks towards them, and would silently skip it.
        """
        if self._checked_graph:
            return
        waiting = [g.grad_fn for g in gradients if g.grad_fn is not None]
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            if node.name().rpartition("::")[2] == "Error":
                raise RuntimeError(
                    "the model or the loss uses a function that is marked once_differentiable"
                )
            following = {function for function, _ in node.next_functions if function is not None}
            waiting.extend(following - seen)
            seen |= following
        self._checked_graph = True


def differentiable_gradients(value: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradient of a scalar, with a graph; None where it does not depend on an input.

    The 1 that the backward pass starts from is part of the graph. So even the very last function
    leaves a node there if its derivative cannot be differentiated again.
    """
    one = torch.ones_like(value, requires_grad=True)
    return torch.autograd.grad(value, inputs, one, create_graph=True, allow_unused=True)
