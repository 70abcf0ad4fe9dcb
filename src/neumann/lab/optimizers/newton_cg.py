"""The arm `cg`: Newton's method on mini-batches with conjugate gradients, as a baseline.

    w ← w + η·d        (C + λI)·d ≈ −∇f(w)

C is the Hessian of the mini-batch's loss f, or its Gauss–Newton matrix, and λ the damping plus the
weight decay. It is the plain method (Nocedal and Wright, Numerical Optimization, section 7.1):
`neumann.theory.conjugate_gradients` ends at a direction of negative curvature, at the tolerance or
after `max_products` products. The damping is constant, and there is no line search.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from neumann.spectrum import GaussNewton, Hessian, Operator
from neumann.theory.conjugate_gradients import KrylovSolution, solve
from neumann.validation import is_number, require, require_integer

CURVATURES = {"hessian": Hessian, "gauss-newton": GaussNewton}


class TruncatedNewton(Optimizer):
    """Newton's method with a truncated solve; one parameter group, in the order of the model.

    Args:
        curvature: "gauss-newton" or "hessian", the matrix that a caller of `step` should pass.
        damping: λ, without the weight decay.
        max_products: the most products of a step.
        tolerance: the relative residual at which a solve ends.
        weight_decay: of a penalty λ‖w‖²/2, part of f.
    """

    last: KrylovSolution | None = None  # of the last step

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        curvature: str = "gauss-newton",
        damping: float = 0.1,
        max_products: int = 10,
        tolerance: float = 0.1,
        weight_decay: float = 0.0,
    ) -> None:
        rates = {"lr": lr, "damping": damping, "tolerance": tolerance, "weight_decay": weight_decay}
        for name, value in rates.items():
            require(is_number(value) and value >= 0, name, value, "finite and at least 0")
        require_integer("max_products", max_products, least=1)
        require(curvature in CURVATURES, "curvature", curvature, f"one of {', '.join(CURVATURES)}")
        super().__init__(params, {**rates, "max_products": max_products, "curvature": curvature})
        groups = len(self.param_groups)
        require(groups == 1, "params", groups, "one parameter group")

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, curvature: Operator | None = None
    ) -> Any:
        """Take one step.

        Args:
            closure: clears the gradients, computes the loss, calls `backward()`, returns the loss.
            curvature: C at the current weights, on the same mini-batch, for all parameters.

        Returns:
            The loss before the update.
        """
        if closure is None or curvature is None:
            raise TypeError("TruncatedNewton.step needs a closure and the curvature")
        (group,) = self.param_groups
        parameters, decay = group["params"], group["weight_decay"]
        loss = torch.enable_grad()(closure)()
        slopes = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat(
            [(g + decay * p).reshape(-1) for g, p in zip(slopes, parameters, strict=True)]
        )
        with curvature.session():
            self.last = solve(
                torch.enable_grad()(curvature.product),
                -flat,
                damping=group["damping"] + decay,
                tolerance=group["tolerance"],
                max_products=group["max_products"],
            )
        pieces = torch.split(self.last.solution, [p.numel() for p in parameters])
        for p, piece in zip(parameters, pieces, strict=True):
            p.add_(piece.view(p.shape), alpha=group["lr"])
        return loss
