"""Errors that all ranks of a process group share.

A rank that raises leaves the others waiting for it in their next collective call. Inside
`together(group, device)` an exception of one rank becomes one of all of them.

How it fails: it cannot help where the block itself holds collective calls, as sharded models do.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed

from neumann.spectrum.operators import NonFiniteProduct

FINE, FAILED, NOT_FINITE = range(3)


@contextmanager
def together(group: distributed.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """Raise on all ranks of the group, if any, when one of them does."""
    if group is None:
        yield
        return
    try:
        yield
    except NonFiniteProduct:
        _exchange(group, device, NOT_FINITE)
        raise
    except Exception:
        _exchange(group, device, FAILED)
        raise
    states = _exchange(group, device, FINE)
    failed = [rank for rank, state in enumerate(states) if state != FINE]
    if failed:
        kind = NonFiniteProduct if NOT_FINITE in states else RuntimeError
        ranks = ", ".join(map(str, failed))
        raise kind(f"rank {ranks} of process_group failed; the error is told there")


def _exchange(group: distributed.ProcessGroup, device: torch.device, state: int) -> list[int]:
    states = torch.zeros(distributed.get_world_size(group), dtype=torch.int64, device=device)
    states[distributed.get_rank(group)] = state
    distributed.all_reduce(states, group=group)
    return [int(state) for state in states.tolist()]
