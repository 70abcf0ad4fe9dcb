"""The update over lists of tensors, in few kernels: eager through foreach, or traced.

The equations are those of :mod:`neumann.optim.update`. A coefficient is a number for all tensors,
in an eager step, or a list with a scalar tensor for each tensor, in a traced step. Which of those
is zero is known only when the compiled graph runs, so a zero is masked there instead of skipped.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from neumann.optim.backends.host import HostBackend
from neumann.optim.phases import Coefficients
from neumann.optim.precision import prepare_update
from neumann.optim.tensors import Tensors
from neumann.optim.update import cast_to, is_one, is_zero


def update_lists(tensors: Tensors, coefficients: Coefficients) -> None:
    """The update of all tensors at once; lists are on one device and of one dtype."""
    w, m, offset = tensors.weights, tensors.iterates, tensors.offsets
    d: list[Any] = tensors.gradients
    if not is_one(coefficients.scale):
        d = _multiply(d, coefficients.scale)
    if not is_zero(coefficients.weight_decay):
        d = _add_product(d, w, coefficients.weight_decay)
    if offset is not None and not is_zero(coefficients.force):
        d = _add_product(d, offset, coefficients.force)

    if is_zero(coefficients.keep):
        torch._foreach_zero_(m)
    elif not is_one(coefficients.keep):
        _multiply_(m, coefficients.keep)
    if not is_zero(coefficients.gain):
        _subtract_product_(m, d, coefficients.gain)

    change = None if is_zero(coefficients.carry) else _multiply(m, coefficients.carry)
    for coefficient, source in ((coefficients.push, d), (coefficients.shrink, w)):
        if is_zero(coefficient):
            continue
        if change is None:
            change = _multiply(source, -coefficient)
        else:
            _subtract_product_(change, source, coefficient)
    if change is not None:
        torch._foreach_add_(w, change)
        if offset is not None:
            torch._foreach_add_(offset, change)
    if offset is not None and not is_one(coefficients.follow):
        torch._foreach_mul_(offset, coefficients.follow)


class ListBackend(HostBackend):
    """Multi-tensor kernels of torch, on any device."""

    name = "lists"

    def prepare_update(
        self, index: int, tensors: Tensors, coefficients: Coefficients, seed: int
    ) -> Callable[[], float]:
        return prepare_update(tensors, coefficients, update_lists, seed)


def _multiply_masked(tensors: list[Tensor], coefficients: list[Tensor]) -> list[Tensor]:
    """The products, and zero where a coefficient is zero, whatever the tensor holds there."""
    return [c * torch.where(c != 0, x, 0.0) for c, x in zip(coefficients, tensors, strict=True)]


def _multiply(tensors: list[Tensor], coefficient: Any) -> list[Tensor]:
    if isinstance(coefficient, list):
        return _multiply_masked(tensors, coefficient)
    return list(torch._foreach_mul(tensors, cast_to(tensors[0], coefficient)))


def _multiply_(tensors: list[Tensor], coefficient: Any) -> None:
    if isinstance(coefficient, list):
        torch._foreach_copy_(tensors, _multiply_masked(tensors, coefficient))
    else:
        torch._foreach_mul_(tensors, coefficient)


def _add_product(tensors: list[Tensor], others: list[Tensor], coefficient: Any) -> list[Tensor]:
    if isinstance(coefficient, list):
        return list(torch._foreach_add(tensors, _multiply_masked(others, coefficient)))
    if isinstance(coefficient, Tensor):  # `alpha` takes numbers only
        products = _multiply(others, coefficient)
        torch._foreach_add_(products, tensors)
        return products
    return list(torch._foreach_add(tensors, others, alpha=coefficient))


def _subtract_product_(tensors: list[Tensor], others: list[Tensor], coefficient: Any) -> None:
    if isinstance(coefficient, list):
        torch._foreach_sub_(tensors, _multiply_masked(others, coefficient))
    else:
        torch._foreach_add_(tensors, others, alpha=-coefficient)
