"""The recipe on sharded models, with fused projections: the weights of one process."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from neumann import large_batch
from tests.support.sharding import needs_fsdp

STEPS = 6
ROWS = 8  # of a batch, over all processes


class Network(nn.Module):
    """An embedding, attention with a fused QKV, a norm and an output layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.norm(x + self.attention(x, x, x, need_weights=False)[0]))


def make():
    torch.manual_seed(0)
    return Network().double()


def train(model, optimizer, schedule, rank=0, ranks=1):
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(11, (ROWS, 5), generator=generator)
        own = tokens.chunk(ranks)[rank]
        optimizer.zero_grad()
        cross_entropy(model(own).flatten(0, 1), own.flatten()).backward()
        optimizer.step()
        schedule.step()
    return [to_whole(p.detach()) for p in model.parameters()]


def to_whole(p):
    return p.full_tensor() if isinstance(p, DTensor) else p


def train_sharded(slow):
    from torch.distributed.fsdp import fully_shard

    model = make()
    fully_shard(model.attention)
    fully_shard(model)
    pair = large_batch(model, STEPS, lr=0.1, slow_momentum=slow, split_heads=True)
    return train(model, *pair, distributed.get_rank(), distributed.get_world_size())


def train_copies(slow):
    model = DistributedDataParallel(make())
    pair = large_batch(model, STEPS, lr=0.1, slow_momentum=slow, split_heads=True)
    return train(model, *pair, distributed.get_rank(), distributed.get_world_size())


@pytest.fixture(scope="module", params=[0.0, 0.6])
def slow(request):
    return request.param


@pytest.fixture(scope="module")
def alone(slow):
    model = make()
    return train(model, *large_batch(model, STEPS, lr=0.1, slow_momentum=slow, split_heads=True))


def check(results, alone):
    for weights in results:
        for ours, theirs in zip(weights, alone, strict=True):
            assert (ours - theirs).abs().max() < 1e-5  # P's arithmetic is in float32


@needs_fsdp
def test_two_shards_equal_one_process(two, alone, slow):
    check(two.run(train_sharded, slow), alone)


@needs_fsdp
def test_four_shards_equal_one_process(four, alone, slow):
    check(four.run(train_sharded, slow), alone)


def test_copies_equal_one_process(two, alone, slow):
    check(two.run(train_copies, slow), alone)
