"""Which steps are skipped: those with a gradient that is not finite, on any process.

torch.amp.GradScaler looks for such gradients itself; `skip_nonfinite=True` looks for them here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from neumann.optim.precision import as_real
from neumann.optim.state import DISTANCE, SKIPPED, StateStore
from neumann.optim.tensors import Tensors


def agree_on_skipping(
    groups: Sequence[Tensors],
    store: StateStore,
    found: Tensor | int | None,
    reduce: Callable[[Tensor | None], Tensor | None] | None,
    replicas: Any = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Decide, with all processes, whether to skip this step.

    Args:
        groups: the tensors of this step.
        store: holds the option `skip_nonfinite`.
        found: the flag that a GradScaler has set on this process, if there is one; the number 0 if
            there are no gradients.
        reduce: adds the flag up over all processes; None if parameters are not sharded.
        replicas: the process group that trains copies of the parameters, if the user has named it;
            its processes share a scaler's flag. None for all processes.

    Returns:
        A tensor that is not zero to skip, None if nobody checks; and what to add to the count of
        skipped steps, which `StateStore.count_skipped` does when the step is taken.
    """
    checks = store.groups[0]["skip_nonfinite"]
    # Where the parameters are: not every process group takes tensors from elsewhere.
    device = store.scalars[DISTANCE].device
    flag = find_nonfinite(groups, device) if checks else None
    if isinstance(found, int):
        found = torch.tensor(found, device=device)
    if found is not None and (reduce is not None or replicas is not None):
        # A scaler may have found it on this process alone, and then the others would wait.
        own = found.ne(0).to(device, torch.int64)
        flag = own.reshape(()) if flag is None else flag + own.reshape(())
        found = None
    if reduce is not None:
        flag = reduce(flag)
    elif flag is not None and distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(flag, distributed.ReduceOp.MAX, group=replicas)
    if flag is None:
        return found, None
    if not checks:
        return flag, None
    flag = flag.ne(0).to(store.scalars[SKIPPED])
    return flag if found is None else found.to(flag) + flag, flag


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
