"""Algorithm 1 of the paper, the idealized Neumann optimizer, for small problems and for teaching.

Every step freezes one mini-batch, whose loss is f, and solves its Newton system ∇²f·z = −∇f(w) by
the Neumann series, with a gradient at a displaced point in place of each Hessian-vector product:

    m₀ = −∇f(w)
    m_k = m_{k−1} − ∇f(w + η_in·m_{k−1})        k = 1 … K
    w  ← w + η_out·m_K

Where f is quadratic, η_in·m_K is exactly the partial sum with K + 1 terms of the series for the
Newton step (``neumann.optim.series`` sums it from the Hessian), so η_out = η_in and K → ∞ give
Newton's method. A step costs K + 1 evaluations of the closure and two copies of the weights.

How it fails:

- The series diverges where η_in > 2/λ_max, and along every direction of negative curvature
  however small η_in is: m_K then grows geometrically with K and the weights with it. Nothing here
  guards against that; it is what Algorithm 2, the class ``Neumann``, is for.
- Away from a quadratic the displaced gradient errs by O(‖η_in·m‖²).
- The closure must evaluate the same function K + 1 times: dropout draws a new mask each time, and
  batch normalisation updates its running statistics at the displaced weights too.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

__all__ = ["IdealizedNeumann"]


class _Solve(NamedTuple):
    """One parameter in the inner loop; all tensors have the parameter's shape."""

    parameter: Tensor
    label: str
    start: Tensor  # w, kept as a copy so that it comes back with the same bits
    iterate: Tensor  # m, updated in place
    inner_lr: float
    outer_lr: float


class IdealizedNeumann(Optimizer):
    """Algorithm 1: an approximate Newton step on every mini-batch, from its gradients alone.

    ``step(closure)`` needs a closure that clears the gradients, evaluates the loss of the frozen
    mini-batch, calls ``backward()`` and returns the loss. ``step`` returns the loss at the weights
    before the update. If the closure raises, the weights are left as they were before the step.
    Afterwards ``p.grad`` holds the gradient of the last evaluation, at the displaced weights.

    Groups may differ in ``inner_lr`` (η_in) and ``outer_lr`` (η_out); the mini-batch is shared, so
    they must agree on ``inner_steps`` (K). A parameter that gets no gradient at the weights
    themselves is left alone.
    """

    def __init__(self, params: ParamsT, inner_lr: float, outer_lr: float, inner_steps: int) -> None:
        defaults = {"inner_lr": inner_lr, "outer_lr": outer_lr, "inner_steps": inner_steps}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check([*self.param_groups, {**self.defaults, **param_group}])
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            raise TypeError(
                "IdealizedNeumann.step needs a closure, got None: it evaluates the loss and the "
                "gradient of one mini-batch inner_steps + 1 times"
            )
        # Again, because groups can be edited and loaded after construction.
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
    """m₀ = −∇f(w) for every parameter that has a gradient."""
    solves = []
    for group_index, group in enumerate(groups):
        for index, parameter in enumerate(group["params"]):
            if "param_names" in group:
                label = f"parameter {group['param_names'][index]!r}"
            else:
                label = f"parameter {index} of group {group_index}"
            gradient = _dense_gradient(parameter, label)
            if gradient is not None:
                inner_lr, outer_lr = float(group["inner_lr"]), float(group["outer_lr"])
                solves.append(
                    _Solve(parameter, label, parameter.clone(), -gradient, inner_lr, outer_lr)
                )
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
            if not (math.isfinite(group[name]) and group[name] >= 0):
                raise ValueError(f"{name} must be finite and at least 0, got {group[name]!r}")
        steps = group["inner_steps"]
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
            raise ValueError(f"inner_steps must be an integer of at least 0, got {steps!r}")
    choices = [group["inner_steps"] for group in groups]
    if len(set(choices)) > 1:
        raise ValueError(
            f"inner_steps must be the same in every group, got {choices}: the groups share one "
            "mini-batch and one inner loop"
        )
