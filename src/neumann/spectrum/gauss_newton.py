"""Products with the Gauss–Newton matrix, the part of the Hessian that is never negative.

With f(w) the outputs of the model and ℓ(f) the mean loss of a batch,

    ∇²ℓ(f(w)) = JᵀLJ + Σᵢ (∂ℓ/∂fᵢ)·∇²fᵢ        J = ∂f/∂w,  L = ∂²ℓ/∂f²

and G = JᵀLJ is the first term: positive semidefinite for a loss that is convex in the outputs, and
equal to the Hessian where the model is linear in its weights. For cross-entropy it is the Fisher
matrix. Jv is the derivative of u ↦ Jᵀu, which is linear in u, in the direction v, so only reverse
mode is needed; where all data go through the model at once its graphs are kept for a session.

How it fails: outputs must be one tensor. An objective that returns the loss as its output has L =
0. A loss with a term that acts on the weights themselves, past the outputs, is an error, and so is
a function that cannot be differentiated twice.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neumann.spectrum.curvature import CurvatureOperator
from neumann.spectrum.hessian import (
    differentiable_gradients,
    refuse_dead_ends,
    second_order,
)
from neumann.spectrum.objective import Loss, scalar


@dataclass(frozen=True)
class Graphs:
    """What the products with one batch share."""

    output: Tensor  # f(w), with the graph of the model
    cotangent: Tensor  # u, shaped like the output; its value is of no importance
    pulled: list[Tensor]  # Jᵀu, with a graph back to u
    reached: list[int]  # the parameters that it is about
    leaf: Tensor  # the output again, without the model behind it
    gradient: Tensor  # ∂ℓ/∂f, with a graph back to the leaf


class GaussNewton(CurvatureOperator):
    """The Gauss–Newton matrix of the mean loss; arguments as for :class:`CurvatureOperator`."""

    matrix = "gauss-newton"

    def __init__(self, model: nn.Module, loss: Loss, **options: Any) -> None:
        super().__init__(model, loss, **options)
        self._graphs: dict[int, Graphs] = {}
        self._twice_differentiable = False  # as far as a look at the graph can tell

    def _environment(self) -> AbstractContextManager[object]:
        return second_order(self.model)

    def _release(self) -> None:
        self._graphs.clear()

    def _piece_product(self, index: int, vector: Tensor) -> Tensor:
        retain = len(self.pieces) == 1
        graphs = self._graphs.get(index)
        if graphs is None:
            with torch.enable_grad():
                graphs = self._build(index)
            if retain:
                self._graphs[index] = graphs
        if not graphs.pulled or not graphs.gradient.requires_grad:  # other parameters alone
            return torch.zeros_like(vector)
        directions = self.layout.split(vector)
        (pushed,) = torch.autograd.grad(  # Jv
            graphs.pulled,
            graphs.cotangent,
            [directions[i] for i in graphs.reached],
            retain_graph=retain,
        )
        (curved,) = torch.autograd.grad(  # LJv
            graphs.gradient, graphs.leaf, pushed, retain_graph=retain, allow_unused=True
        )
        if curved is None:  # a loss that is linear in the outputs
            return torch.zeros_like(vector)
        answer = torch.autograd.grad(  # JᵀLJv
            graphs.output, self.parameters, curved, retain_graph=retain, allow_unused=True
        )
        return self.layout.join(answer)

    def _build(self, index: int) -> Graphs:
        batch = self._data(index)
        output = self.objective.forward(self.model, batch)
        if not isinstance(output, Tensor):
            raise TypeError(
                f"Gauss-Newton needs a model that returns one tensor, got {type(output).__name__}; "
                "pass an Objective whose forward picks one"
            )
        if not output.requires_grad:
            self._passes.finish(output.sum())  # which says why not
        leaf = output.detach().requires_grad_()
        loss = self._passes.finish(scalar(self.objective.loss(leaf, batch)))
        gradient, *beside = differentiable_gradients(loss, [leaf, *self.parameters])
        if gradient is None:
            gradient = torch.zeros_like(leaf)
        direct = [n for n, g in zip(self.layout.names, beside, strict=True) if g is not None]
        if direct:
            raise ValueError(
                f"the loss depends on {', '.join(direct)} past the outputs of the model, which "
                "Gauss-Newton leaves out; take a penalty out of the loss (weight_decay= adds one), "
                "or use Hessian"
            )
        cotangent = torch.zeros_like(leaf).requires_grad_()
        pulled = torch.autograd.grad(
            output, self.parameters, cotangent, create_graph=True, allow_unused=True
        )
        reached = [i for i, p in enumerate(pulled) if p is not None and p.requires_grad]
        found = [p for p in pulled if p is not None and p.requires_grad]
        if not self._twice_differentiable:
            refuse_dead_ends([gradient, *found])
            self._twice_differentiable = True
        return Graphs(output, cotangent, found, reached, leaf, gradient)
