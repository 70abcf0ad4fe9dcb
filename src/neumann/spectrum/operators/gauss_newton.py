"""Products with the Gauss–Newton matrix, the part of the Hessian that is never negative.

    ∇²ℓ(f(w)) = JᵀLJ + Σᵢ (∂ℓ/∂fᵢ)·∇²fᵢ        J = ∂f/∂w,  L = ∂²ℓ/∂f²

G = JᵀLJ, with f(w) the outputs of the model and ℓ(f) the mean loss. It is positive semidefinite if
the loss is convex in the outputs. Only reverse mode is needed: u ↦ Jᵀu is linear in u, and its
derivative in the direction v gives Jv. If an objective returns the loss as its output, L = 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from neumann.spectrum.operators.autograd import AutogradOperator, differentiable_gradients
from neumann.spectrum.operators.objective import check_scalar


@dataclass(frozen=True)
class _Graphs:
    """What the products with one batch share."""

    output: Tensor  # f(w), with the graph of the model
    cotangent: Tensor  # u, shaped like the output; its value does not matter
    vjp: list[Tensor]  # Jᵀu, with a graph back to u
    reached: list[int]  # indices of the parameters in `vjp`
    leaf: Tensor  # the output without the model behind it
    gradient: Tensor  # ∂ℓ/∂f, with a graph back to the leaf


class GaussNewton(AutogradOperator):
    """The Gauss–Newton matrix of the mean loss; arguments as for :class:`CurvatureOperator`."""

    matrix = "gauss-newton"

    def _piece_product(self, index: int, vector: Tensor) -> Tensor:
        retain = len(self.pieces) == 1
        graphs: _Graphs | None = self._graphs.get(index)
        if graphs is None:
            with torch.enable_grad():
                graphs = self._build_graphs(index)
            if retain:
                self._graphs[index] = graphs
        if not graphs.vjp or not graphs.gradient.requires_grad:  # the loss reaches none of them
            return torch.zeros_like(vector)
        pieces = self.layout.split(vector)
        directions = [pieces[i] for i in graphs.reached]
        (jv,) = torch.autograd.grad(graphs.vjp, graphs.cotangent, directions, retain_graph=retain)
        (ljv,) = torch.autograd.grad(
            graphs.gradient, graphs.leaf, jv, retain_graph=retain, allow_unused=True
        )
        if ljv is None:  # the loss is linear in the outputs
            return torch.zeros_like(vector)
        jtljv = torch.autograd.grad(
            graphs.output, self.parameters, ljv, retain_graph=retain, allow_unused=True
        )
        return self.layout.join(jtljv)

    def _build_graphs(self, index: int) -> _Graphs:
        batch = self._start_pass(index)
        output = self.objective.forward(self.model, batch)
        if not isinstance(output, Tensor):
            raise TypeError(
                f"Gauss-Newton needs a model that returns one tensor, got {type(output).__name__}; "
                "pass an Objective whose forward picks one"
            )
        if not output.requires_grad:
            self._passes.finish(output.sum())  # raises, and says why
        leaf = output.detach().requires_grad_()
        loss = self._passes.finish(check_scalar(self.objective.loss(leaf, batch)))
        gradient, *direct_gradients = differentiable_gradients(loss, [leaf, *self.parameters])
        if gradient is None:
            gradient = torch.zeros_like(leaf)
        named = zip(self.layout.names, direct_gradients, strict=True)
        direct = [name for name, g in named if g is not None]
        if direct:
            raise ValueError(
                f"the loss depends directly on {', '.join(direct)}, not only on the outputs of the "
                "model, and Gauss-Newton would ignore that; remove the penalty from the loss "
                "(weight_decay= adds one), or use Hessian"
            )
        cotangent = torch.zeros_like(leaf).requires_grad_()
        vjp = torch.autograd.grad(
            output, self.parameters, cotangent, create_graph=True, allow_unused=True
        )
        reached = [i for i, g in enumerate(vjp) if g is not None and g.requires_grad]
        found = [vjp[i] for i in reached]
        self._check_twice_differentiable([gradient, *found])
        return _Graphs(output, cotangent, found, reached, leaf, gradient)
