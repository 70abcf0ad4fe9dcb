"""The small training, sharded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from neumann import Neumann
from neumann.optim import distributed as optim_distributed
from tests.support.small_training import OPTIONS, network, share

needs_fsdp = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason=f"FSDP2 of torch {torch.__version__} does not run on a CPU",
)

FLAT, HYBRID = (-1,), (2, 2)  # one dimension to shard over; replicas of two shards


def sharded(
    shape: tuple[int, ...] = FLAT, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[nn.Module, Neumann]:
    """The network and its optimizer; the first layer is sharded apart from the rest."""
    size = distributed.get_world_size()
    names = ("shard",) if shape == FLAT else ("replicate", "shard")
    mesh = init_device_mesh("cpu", (size,) if shape == FLAT else shape, mesh_dim_names=names)
    model = network(dtype)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, Neumann(model.named_parameters(), **{**OPTIONS, **options})


def own_share(x: Tensor) -> Tensor:
    return share(x, distributed.get_rank(), distributed.get_world_size())


@contextmanager
def counted_reductions() -> Iterator[list[int]]:
    """An entry for each all-reduce that the optimizer asks for; FSDP has its own."""
    counts = []

    def all_reduce(*args: Any, **kwargs: Any) -> None:
        counts.append(1)
        distributed.all_reduce(*args, **kwargs)

    watched = mock.Mock(wraps=distributed)
    watched.all_reduce = all_reduce
    with mock.patch.object(optim_distributed, "distributed", watched):
        yield counts
