"""Which steps are skipped: those with a gradient that is not finite."""

from collections.abc import Sequence

import torch
from torch import Tensor

from neumann.optim.precision import as_real
from neumann.optim.tensors import Tensors


def find_nonfinite(groups: Sequence[Tensors], device: torch.device) -> Tensor:
    """1 on `device` if any element of any gradient is inf or NaN, else 0; an int64 scalar."""
    buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in (g for group in groups for g in group.gradients):
        if gradient is not None and gradient.numel():
            real = as_real(gradient)
            buckets.setdefault((real.device, real.dtype), []).append(real)
    flag = torch.zeros((), dtype=torch.int64, device=device)
    for bucket in buckets.values():
        # The largest magnitude carries inf and NaN and, unlike a sum of squares, cannot overflow.
        peaks = torch.stack(torch._foreach_norm(bucket, torch.inf))
        flag = flag.maximum((~torch.isfinite(peaks)).any().to(device, torch.int64))
    return flag
