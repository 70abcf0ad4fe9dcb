"""Which steps are skipped: those with a gradient that is not finite."""

from collections.abc import Sequence

import torch
from torch import Tensor

from neumann.optim.precision import as_real


def find_nonfinite(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """1 on `device` if any element of any gradient is inf or NaN, else 0; an int64 scalar."""
    buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            real = as_real(gradient)
            buckets.setdefault((real.device, real.dtype), []).append(real)
    flag = torch.zeros((), dtype=torch.int64, device=device)
    for bucket in buckets.values():
        # The largest magnitude carries inf and NaN and, unlike a sum of squares, cannot overflow.
        peaks = torch.stack(torch._foreach_norm(bucket, torch.inf))
        flag = flag.maximum((~torch.isfinite(peaks)).any().to(device, torch.int64))
    return flag
