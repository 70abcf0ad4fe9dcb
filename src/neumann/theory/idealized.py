"""Algorithm 1 of the paper, the idealized Neumann optimizer.

Each step takes one mini-batch with loss f and solves the Newton system ∇²f·z = −∇f(w) with the
Neumann series. To first order ∇f(w + η_in·m) ≈ ∇f(w) + η_in·∇²f·m, so a gradient at displaced
weights replaces each Hessian-vector product:

    m₀ = −∇f(w)
    m_k = m_{k−1} − ∇f(w + η_in·m_{k−1})        k = 1 … K
    w  ← w + η_out·m_K

If f is quadratic, η_in·m_K is exactly the sum of the first K + 1 terms of the series for the Newton
step (``neumann.theory.series``), so η_out = η_in and K → ∞ give Newton's method; K = 0 is gradient
descent. A step takes K + 1 gradients.

The series diverges if η_in > 2/λ_max, and in every direction of negative curvature however small
η_in is; then the weights grow geometrically with K. The convexified form (section 3.1) replaces
η_in·∇²f by the positive definite B̂ = (1 − μ)·I + μ·η_in·∇²f:

    m_k = μ·m_{k−1} − ∇f(w + μ·η_in·m_{k−1})        → −B̂⁻¹·∇f(w)

with η_in = 1/λ_max and μ = λ_max/(|λ_min| + λ_max), see ``neumann.spectrum.coefficients``. It
converges for every η_in ≤ 1/λ_max and every μ below that one; μ = 1 is the plain form. The paper
writes m for η_in·m there.

How it fails: the closure must evaluate the same function K + 1 times, so dropout has to draw the
same masks. BatchNorm updates its running statistics at the displaced weights too, unless the
closure prevents it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from neumann.validation import is_number, require, require_integer

__all__ = ["IdealizedNeumann"]


class _InnerState(NamedTuple):
    """One parameter in the inner loop; all tensors have the parameter's shape."""

    parameter: Tensor
    label: str
    start: Tensor  # a copy of w, to restore the same bits
    iterate: Tensor  # m, updated in place
    lr: float  # η_out
    inner_lr: float  # η_in
    momentum: float  # μ
    weight_decay: float


class IdealizedNeumann(Optimizer):
    """Algorithm 1: an approximate Newton step on every mini-batch, using only gradients.

    Args:
        params: parameters or parameter groups. Groups may differ in all but ``inner_steps``.
        inner_lr: η_in, about 1/λ_max; None is ``lr``, also when a schedule changes it.
        outer_lr: another name for ``lr``.
        inner_steps: K, the same in every group, because the groups share one inner loop.
        lr: η_out.
        momentum: μ in (0, 1] of the convexified form; 1 is the plain series.
        weight_decay: λ of a penalty λ‖w‖²/2, part of f.
    """

    def __init__(
        self,
        params: ParamsT,
        inner_lr: float | None = None,
        outer_lr: float | None = None,
        inner_steps: int = 1,
        *,
        lr: float | None = None,
        momentum: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        if (lr is None) == (outer_lr is None):
            raise TypeError("IdealizedNeumann needs either lr or outer_lr, another name for it")
        defaults = {
            "lr": outer_lr if lr is None else lr,
            "inner_lr": inner_lr,
            "inner_steps": inner_steps,
            "momentum": momentum,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "outer_lr" in param_group:
            param_group = {**param_group, "lr": param_group["outer_lr"]}
            del param_group["outer_lr"]
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
            raise TypeError("IdealizedNeumann.step needs a closure, which it calls several times")
        # Checked again, because groups can be edited or loaded after construction.
        _check(self.param_groups)
        evaluate = torch.enable_grad()(closure)

        loss = evaluate()
        solves = _begin(self.param_groups)
        try:
            for _ in range(self.param_groups[0]["inner_steps"]):
                for solve in solves:
                    displacement = solve.momentum * solve.inner_lr
                    solve.parameter.copy_(solve.start).add_(solve.iterate, alpha=displacement)
                evaluate()
                for solve in solves:
                    gradient = _compute_gradient(solve.parameter, solve.label, solve.weight_decay)
                    solve.iterate.mul_(solve.momentum)
                    if gradient is not None:
                        solve.iterate.sub_(gradient)
        finally:
            for solve in solves:
                solve.parameter.copy_(solve.start)
        for solve in solves:
            solve.parameter.add_(solve.iterate, alpha=solve.lr)
        return loss


def _begin(groups: Sequence[dict[str, Any]]) -> list[_InnerState]:
    """Return m₀ = −∇f(w) for every parameter that has a gradient."""
    solves = []
    for number, group in enumerate(groups):
        lr, inner = float(group["lr"]), group["inner_lr"]
        options = lr, lr if inner is None else float(inner), group["momentum"]
        for index, p in enumerate(group["params"]):
            label = f"parameter {index} of group {number}"
            if "param_names" in group:
                label = f"parameter {group['param_names'][index]!r}"
            gradient = _compute_gradient(p, label, group["weight_decay"])
            if gradient is not None:
                solves.append(
                    _InnerState(p, label, p.clone(), -gradient, *options, group["weight_decay"])
                )
    return solves


def _compute_gradient(parameter: Tensor, label: str, weight_decay: float) -> Tensor | None:
    """Return the gradient of loss and penalty where the parameter is now."""
    gradient = parameter.grad
    if gradient is not None and gradient.layout != torch.strided:
        raise ValueError(
            f"{label} has a gradient of layout {gradient.layout}; IdealizedNeumann needs dense "
            "gradients (for an embedding: sparse=False)"
        )
    if gradient is None or weight_decay == 0:
        return gradient
    return gradient.add(parameter, alpha=weight_decay)


def _check(groups: Sequence[dict[str, Any]]) -> None:
    for group in groups:
        for name in ("lr", "inner_lr", "weight_decay"):
            value = float(group[name]) if isinstance(group[name], Tensor) else group[name]
            good = name == "inner_lr" if value is None else is_number(value) and value >= 0
            require(good, name, value, "finite and at least 0")
        momentum = group["momentum"]
        require(is_number(momentum) and 0 < momentum <= 1, "momentum", momentum, "in (0, 1]")
        require_integer("inner_steps", group["inner_steps"], least=0)
    choices = [group["inner_steps"] for group in groups]
    # The groups share one mini-batch and one inner loop.
    require(len(set(choices)) == 1, "inner_steps", choices, "the same in every group")
