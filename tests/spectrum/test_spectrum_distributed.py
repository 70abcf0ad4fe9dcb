"""Two processes with their own batches measure what one process measures with all of them."""

import pytest
import torch
from small_networks import batch, mlp
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from neumann.spectrum import Differences, GaussNewton, Hessian, extremes

KINDS = {"hessian": Hessian, "gauss-newton": GaussNewton, "differences": Differences}


def network(norm=True, dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(*mlp(5, 6, 3, norm=norm), nn.Dropout(dropout)).double()


def batches():
    """Of different sizes: three for the first rank, one for the second."""
    return [batch(size, 5, seed=size) for size in (6, 9, 4, 11)]


def numbers(found):
    ends = [(e.value, e.error, e.residual) for e in (found.smallest, found.largest)]
    return ends, found.products, found.about.examples


def measured(kind, dropout):
    rank = distributed.get_rank()
    mine = batches()[:3] if rank == 0 else batches()[3:]
    model = DistributedDataParallel(network(dropout=dropout))
    operator = KINDS[kind](
        model, cross_entropy, loader=mine, process_group=distributed.group.WORLD, weight_decay=0.1
    )
    product = operator @ torch.ones(operator.size, dtype=torch.float64)
    return product, numbers(extremes(operator)), operator.about.ranks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_ranks_agree_with_one_process(two, kind, dropout):
    alone = KINDS[kind](network(dropout=dropout), cross_entropy, loader=batches(), weight_decay=0.1)
    expected = alone @ torch.ones(alone.size, dtype=torch.float64)
    ends, products, examples = numbers(extremes(alone))
    answers = two.run(measured, kind, dropout)
    for product, (their_ends, their_products, their_examples), ranks in answers:
        assert torch.allclose(product, expected, atol=1e-8)
        assert (their_products, their_examples, ranks) == (products, examples, 2)
        for ours, theirs in zip(ends, their_ends, strict=True):
            assert theirs[0] == pytest.approx(ours[0], abs=1e-8)
    (first, found, _), (second, same, _) = answers
    assert torch.equal(first, second)
    assert found == same


def misfit():
    wanted = None if distributed.get_rank() == 0 else ["0.*"]
    try:
        Hessian(
            network(),
            cross_entropy,
            batch=batches()[0],
            parameters=wanted,
            process_group=distributed.group.WORLD,
        )
    except ValueError as error:
        return str(error)
    return None


def test_ranks_must_measure_the_same_parameters(two):
    for message in two.run(misfit):
        assert "must measure the same parameters" in message


def sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    model = network(norm=False)
    mesh = init_device_mesh("cpu", (ranks,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    group = mesh.get_group()
    mine = batches()[:2] if rank == 0 else batches()[2:]
    operator = Differences(model, cross_entropy, loader=mine, process_group=group)
    before = [p.full_tensor().clone() for p in model.parameters()]
    product = operator @ torch.ones(operator.size, dtype=torch.float64)
    found = extremes(operator)
    after = [p.full_tensor() for p in model.parameters()]
    unchanged = all(map(torch.equal, before, after))
    return product, found.largest.value, unchanged and all(p.grad is None for p in after)


def test_sharded_parameters_by_differences(two):
    alone = Hessian(network(norm=False), cross_entropy, loader=batches())
    expected = alone @ torch.ones(alone.size, dtype=torch.float64)
    top = extremes(alone, tolerance=1e-6).largest.value
    for product, largest, unchanged in two.run(sharded):
        assert torch.allclose(product, expected, atol=1e-6)
        assert largest == pytest.approx(top, rel=1e-3)
        assert unchanged
