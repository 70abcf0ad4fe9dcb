"""How far products in float32 are from those of a float64 copy of the model.

A normalization layer subtracts a mean. If that is many standard deviations, the features that
remain have lost digits, and the products belong to a slightly different loss. They are as symmetric
and repeatable as before, so Lanczos sees nothing. With a batch of 4, λ was off by up to
4e-6·max|λ| at a mean of 10 standard deviations, and by up to 1e-4·max|λ| at 100 to 300.

`record_means` looks for such layers during a pass. If there are any, `difference_norm` multiplies
the same vectors in both precisions. Let E be the difference. The eigenvalues move by at most ‖E‖
(Weyl), which a few steps of the power method estimate. E is close to low rank, and three products
from a random start gave between 0.33 and 1 times ‖E‖; so the error is four times that.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from neumann.caller_warnings import warn_caller

Multiply = Callable[[Tensor], Tensor]

LARGE_RATIO = 4.0  # |mean| in standard deviations from which a layer is worth a comparison
WARNING_RATIO = 10.0  # from which the loss of digits may exceed the other noise
POWER_STEPS = 3
ERROR_PER_DIFFERENCE = 4.0  # the power method finds a third of ‖E‖ or more


def is_normalization(module: nn.Module) -> bool:
    return isinstance(module, _NormBase | nn.LayerNorm | nn.GroupNorm)


@contextmanager
def record_means(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield a dict that passes fill: the largest |mean|/std that each layer normalized."""
    found: dict[str, Tensor] = {}
    handles = []

    def observe(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if inputs and isinstance(inputs[0], Tensor):
                ratio = _mean_in_deviations(module, inputs[0].detach())
                found[name] = torch.maximum(found.get(name, ratio), ratio)

        return hook

    for name, module in model.named_modules():
        if is_normalization(module):
            handles.append(module.register_forward_pre_hook(observe(name)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _mean_in_deviations(module: nn.Module, features: Tensor) -> Tensor:
    """Return the largest |mean|/√(variance + ε) of what a layer normalizes together."""
    if isinstance(module, nn.LayerNorm):
        groups = features.flatten(features.ndim - len(module.normalized_shape))
    elif isinstance(module, nn.GroupNorm):
        groups = features.reshape(features.shape[0], module.num_groups, -1)
    elif isinstance(module, nn.modules.instancenorm._InstanceNorm):
        groups = features.flatten(2) if features.ndim > 2 else features
    else:  # BatchNorm: a channel over all examples and places
        groups = features.transpose(0, 1).flatten(1) if features.ndim > 1 else features
    if groups.numel() == 0:
        return features.new_zeros(())
    wide = groups.double() if groups.device.type != "mps" else groups.float()
    deviation = (wide.var(-1, correction=0) + float(module.eps)).sqrt()  # type: ignore[arg-type]
    ratio: Tensor = (wide.mean(-1).abs() / deviation).max()
    return ratio


def difference_norm(multiply: Multiply, multiply_in_float64: Multiply, start: Tensor) -> float:
    """Estimate ‖E‖ for the difference E of two products, from a random start of length 1."""
    largest, unit = 0.0, start
    for _ in range(POWER_STEPS):
        difference = multiply(unit).double() - multiply_in_float64(unit.double())
        length = float(torch.linalg.vector_norm(difference))
        largest = max(largest, length)
        if length == 0:
            break
        unit = (difference / length).to(start.dtype)
    return largest


def warn_of_lost_digits(layer: str, ratio: float, reason: str) -> None:
    warn_caller(
        f"layer {layer!r} normalizes features whose mean is {ratio:.0f} standard deviations: "
        f"float32 loses digits there, and the stated errors do not include that, because {reason}; "
        "measure copy.deepcopy(model).double()",
    )
