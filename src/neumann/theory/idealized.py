"""Algorithm 1 of the paper, the idealized Neumann optimizer, for small problems and for teaching.

Each step takes one mini-batch with loss f and solves the Newton system ∇²f·z = −∇f(w) with the
Neumann series. To first order ∇f(w + η_in·m) ≈ ∇f(w) + η_in·∇²f·m, so a gradient at displaced
weights replaces each Hessian-vector product:

    m₀ = −∇f(w)
    m_k = m_{k−1} − ∇f(w + η_in·m_{k−1})        k = 1 … K
    w  ← w + η_out·m_K

If f is quadratic, η_in·m_K is exactly the sum of the first K + 1 terms of the series for the Newton
step (``neumann.theory.series``), so η_out = η_in and K → ∞ give Newton's method.

How it fails: the series diverges if η_in > 2/λ_max, and in every direction of negative curvature
however small η_in is; then the weights grow geometrically with K. Algorithm 2, the class
``Neumann``, prevents that. The closure must evaluate the same function K + 1 times; dropout breaks
this, and BatchNorm updates its running statistics at the displaced weights.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from neumann.validation import require, require_integer

__all__ = ["IdealizedNeumann"]


class _Solve(NamedTuple):
    """One parameter in the inner loop; all tensors have the parameter's shape."""

    parameter: Tensor
    label: str
    start: Tensor  # a copy of w, to restore the same bits
    iterate: Tensor  # m, updated in place
    inner_lr: float
    outer_lr: float


class IdealizedNeumann(Optimizer):
    """Algorithm 1: an approximate Newton step on every mini-batch, using only gradients.

    Args:
        params: parameters or parameter groups.
        inner_lr: η_in, about 1/λ_max. May differ between groups.
        outer_lr: η_out. May differ between groups.
        inner_steps: K, the same in every group, because the groups share one inner loop.
    """

    def __init__(self, params: ParamsT, inner_lr: float, outer_lr: float, inner_steps: int) -> None:
        defaults = {"inner_lr": inner_lr, "outer_lr": outer_lr, "inner_steps": inner_steps}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check([*self.param_groups, {**self.defaults, **param_group}])
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        A parameter without a gradient at the current weights does not move. Afterwards ``p.grad``
        holds the gradient of the last evaluation, at the displaced weights. If the closure raises,
        the weights are restored.

        Args:
            closure: clears the gradients, computes the loss of one fixed mini-batch, calls
                ``backward()`` and returns the loss.

        Returns:
            The loss before the update.
        """
        if closure is None:
            raise TypeError("IdealizedNeumann.step needs a closure, to evaluate it several times")
        # Checked again, because groups can be edited or loaded after construction.
        _check(self.param_groups)
        evaluate = torch.enable_grad()(closure)

        loss = evaluate()
        solves = _begin(self.param_groups)
        try:
            for _ in range(self.param_groups[0]["inner_steps"]):
                for solve in solves:
                    solve.parameter.copy_(solve.start).add_(solve.iterate, alpha=solve.inner_lr)
                evaluate()
                for solve in solves:
                    gradient = _dense_gradient(solve.parameter, solve.label)
                    if gradient is not None:
                        solve.iterate.sub_(gradient)
        finally:
            for solve in solves:
                solve.parameter.copy_(solve.start)
        for solve in solves:
            solve.parameter.add_(solve.iterate, alpha=solve.outer_lr)
        return loss


def _begin(groups: Sequence[dict[str, Any]]) -> list[_Solve]:
    """Return m₀ = −∇f(w) for every parameter that has a gradient."""
    solves = []
    for number, group in enumerate(groups):
        rates = float(group["inner_lr"]), float(group["outer_lr"])
        for index, p in enumerate(group["params"]):
            label = f"parameter {index} of group {number}"
            if "param_names" in group:
                label = f"parameter {group['param_names'][index]!r}"
            gradient = _dense_gradient(p, label)
            if gradient is not None:
                solves.append(_Solve(p, label, p.clone(), -gradient, *rates))
    return solves


def _dense_gradient(parameter: Tensor, label: str) -> Tensor | None:
    gradient = parameter.grad
    if gradient is not None and gradient.layout != torch.strided:
        raise ValueError(
            f"{label} has a gradient of layout {gradient.layout}; IdealizedNeumann needs dense "
            "gradients (for an embedding: sparse=False)"
        )
    return gradient


def _check(groups: Sequence[dict[str, Any]]) -> None:
    for group in groups:
        for name in ("inner_lr", "outer_lr"):
            good = math.isfinite(group[name]) and group[name] >= 0
            require(good, name, group[name], "finite and at least 0")
        require_integer("inner_steps", group["inner_steps"], least=0)
    choices = [group["inner_steps"] for group in groups]
    # The groups share one mini-batch and one inner loop.
    require(len(set(choices)) == 1, "inner_steps", choices, "the same in every group")
