"""Wrapped models have the roles and the names of the models inside."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from neumann.optim.roles import find_roles
from tests.support.role_models import Network
from tests.support.sharding import needs_fsdp


def table(model):
    return [(one.name, tuple(one.parameter.shape), one.role, one.view) for one in find_roles(model)]


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_blocks():
    model = Network()
    model.blocks = nn.ModuleList(compiled(block) for block in model.blocks)
    return model


def checkpointed_blocks():
    model = Network()
    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    return model


@pytest.mark.parametrize(
    "build",
    [
        lambda: compiled(Network()),
        compiled_blocks,
        checkpointed_blocks,
        lambda: nn.DataParallel(Network()),
        lambda: compiled(nn.DataParallel(checkpointed_blocks())),
    ],
)
def test_wrapped_models(build):
    assert table(build()) == table(Network())


def sequences():
    inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 3))
    return nn.Sequential(*inner)


def test_wrappers_do_not_make_layers_repeated_blocks():
    assert table(nn.Sequential(*map(compiled, sequences()))) == table(sequences())
    layers = nn.Linear(4, 8), nn.Linear(8, 3)
    assert table(nn.Sequential(*map(compiled, layers))) == table(nn.Sequential(*layers))


def test_a_module_may_have_the_name_of_a_wrapper():
    """`module` is dropped if a wrapper added it, not if the user did."""
    model = nn.Module()
    model.module = nn.Linear(3, 4)
    model.weight = nn.Parameter(torch.zeros(2, 3))
    assert [row[0] for row in table(model)] == ["weight", "module.weight", "module.bias"]


def roles_in_parallel():
    plain = table(Network())
    model = DistributedDataParallel(Network())
    return table(model) == table(compiled(model)) == plain


def test_ddp(two):
    assert all(two.run(roles_in_parallel))


def roles_when_sharded():
    model = Network()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model.head)
    fully_shard(model)
    return table(model) == table(compiled(model)) == table(Network())


def roles_of_sharded_sequences():
    model = sequences()
    for part in model:
        fully_shard(part)
    return table(fully_shard(model)) == table(sequences())


@needs_fsdp
def test_fsdp(two):
    assert all(two.run(roles_when_sharded))
    assert all(two.run(roles_of_sharded_sequences))


def refusal():
    model = FullyShardedDataParallel(Network(), use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"FSDP1.*: use fully_shard \(FSDP2\)") as e:
        find_roles(model)
    distributed.barrier()
    return str(e.value)


@needs_fsdp
def test_fsdp1_is_refused(two):
    assert all("\n" not in message for message in two.run(refusal))
