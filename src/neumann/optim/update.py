"""The update: one set of equations for all phases, and their readable form.

    d  = s·g + λ·w + c·δ        δ = w − v, the offset from the moving average
    m  ← a·m − e·d
    Δ  = b·m − f·d − z·w
    w  ← w + Δ
    δ  ← h·(δ + Δ)

The coefficients (a, e, b, f, z, h, c, λ, s) come from :mod:`neumann.optim.phases`. λ is L2 weight
decay, z decoupled weight decay, c the force of :mod:`neumann.optim.distance`, s = ±1/grad_scale. A
coefficient of zero drops its term instead of multiplying by it. So a NaN in an old iterate does not
survive a reset, and a reset moves no weight whose gradient overflowed.

The equations exist in four forms: `update_single` here, lists (`backends/lists.py`), numba
(`backends/cpu/numba_kernel.py`) and Triton (`backends/cuda/update_kernel.py`). Their
dtypes are defined in `precision`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from neumann.optim.phases import Coefficients
from neumann.optim.tensors import Tensors

Update = Callable[[Tensors, Coefficients], None]


def update_single(tensors: Tensors, coefficients: Coefficients) -> None:
    """The readable update, one tensor at a time; the only form that autograd can record."""
    for w, g, m, offset in tensors:
        w_old, m_old, offset_old = _snapshot(w), _snapshot(m), _snapshot(offset)
        d = g if is_one(coefficients.scale) else coefficients.scale * g
        if not is_zero(coefficients.weight_decay):
            d = torch.add(d, w_old, alpha=coefficients.weight_decay)
        if offset_old is not None and not is_zero(coefficients.force):
            d = d + cast_to(d, coefficients.force) * offset_old
        m_new = _combine((coefficients.keep, m_old), (-coefficients.gain, d))
        change = _combine(
            (coefficients.carry, m_new), (-coefficients.push, d), (-coefficients.shrink, w_old)
        )
        m.copy_(m_new)
        w.add_(change)
        if offset is not None and offset_old is not None:
            offset.copy_(coefficients.follow * (offset_old + change))


def _snapshot(tensor: Any) -> Any:
    """A copy where autograd will need the old values: the tensor itself is about to change."""
    return tensor.clone() if torch.is_grad_enabled() and tensor is not None else tensor


def _combine(*terms: tuple[Any, Tensor]) -> Tensor:
    """Σ coefficient·tensor over the terms whose coefficient is not zero."""
    products = [coefficient * tensor for coefficient, tensor in terms if not is_zero(coefficient)]
    if not products:
        return torch.zeros_like(terms[0][1])
    total: Tensor = products[0]
    for product in products[1:]:
        total = total + product
    return total


def is_zero(coefficient: Any) -> bool:
    """Whether a coefficient is the number 0. A tensor is data, which control flow must not read."""
    return isinstance(coefficient, (int, float)) and coefficient == 0


def is_one(coefficient: Any) -> bool:
    """Whether a coefficient is the number 1."""
    return isinstance(coefficient, (int, float)) and coefficient == 1


def cast_to(like: Tensor, coefficient: Any) -> Any:
    """A tensor coefficient with the dtype and device of `like`; numbers stay as they are."""
    return coefficient.to(like) if isinstance(coefficient, Tensor) else coefficient
