"""The distance r = ‖w − v‖ over all parameters together, and the force that depends on it.

The regularized gradient of the paper (section 3.1) is g + c·(w − v) with

    c = α·r − β/r³

a cubic attraction and a repulsion. The repulsion is bounded: R = max(r, r*) replaces r in its
denominator, where

    r* = ∛(γηβ / ((1 − γ)(1 − μ)))

is the equilibrium of repulsion and the moving average. From r* on this is the printed formula;
below it the force falls to zero with r instead of exploding. Without the bound R = r, and there is
no force at r = 0. η and μ belong to a group, so c does too; r is one number for all.

Everything stays a tensor, so that a step on an accelerator does not wait for the host.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from neumann.optim.options import StepOptions


def scalar_dtype(device: torch.device) -> torch.dtype:
    """The dtype for the few scalars of a step: float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def distance_squared(offsets: Sequence[Tensor], device: torch.device) -> Tensor:
    """r² = Σ‖δ‖² as a scalar on `device`, for offsets on any devices and of any dtypes."""
    dtype = scalar_dtype(device)
    buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for offset in offsets:
        if offset.numel():
            real = torch.view_as_real(offset) if offset.is_complex() else offset
            buckets.setdefault((real.device, real.dtype), []).append(real)
    total = torch.zeros((), dtype=dtype, device=device)
    for (_, bucket_dtype), bucket in buckets.items():
        # The norm of a half-precision tensor is summed, and returned, in float32.
        wide = torch.promote_types(bucket_dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm(bucket, 2, dtype=wide))
        total = total + norms.to(scalar_dtype(norms.device)).square().sum().to(device, dtype)
    return total


def take_root(squared: Tensor) -> Tensor:
    """r from r², with a derivative of 0 instead of infinity at r = 0."""
    positive = squared > 0
    return torch.where(positive, torch.where(positive, squared, 1).sqrt(), 0)


def equilibrium_distance(lr: Any, momentum: Any, options: StepOptions) -> Any:
    """r*, where repulsion and the moving average balance."""
    average, repulsive = options.average, options.repulsive
    return (average * lr * repulsive / ((1 - average) * (1 - momentum))) ** (1 / 3)


def repulsion(distance: Tensor, lr: Any, momentum: Any, options: StepOptions) -> Tensor:
    """β/R³, and 0 where R = 0."""
    reach = distance
    if options.bounded:
        reach = distance.clamp(min=equilibrium_distance(lr, momentum, options))
    # Divide by a placeholder where R = 0: where() alone would leave NaN in a derivative.
    safe = torch.where(reach > 0, reach, torch.ones_like(reach))
    return torch.where(reach > 0, options.repulsive / safe**3, torch.zeros_like(reach))


def force(distance: Tensor, lr: Any, momentum: Any, options: StepOptions) -> Tensor:
    """c = α·r − β/R³."""
    attraction = options.cubic * distance
    if options.repulsive == 0:
        return attraction
    return attraction - repulsion(distance, lr, momentum, options)
