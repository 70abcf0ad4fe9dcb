"""Two processes, each with its own batches, measure what one process measures with all of them."""

import pytest
import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from neumann.spectrum import Differences, GaussNewton, Hessian, extremes
from tests.support.small_networks import batch, mlp

KINDS = {"hessian": Hessian, "gauss-newton": GaussNewton, "differences": Differences}


def network(norm=True, dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(*mlp(5, 6, 3, norm=norm), nn.Dropout(dropout)).double()


def batches():
    """Return batches of different sizes: three for the first rank, one for the second."""
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
def test_ranks_match_one_process(two, kind, dropout):
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
        assert "must be the same on all ranks" in message


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


def refused(what):
    """Return the error of each rank when only the second one has a problem."""
    rank = distributed.get_rank()
    model, (x, y) = network(norm=False), batches()[3]
    options = {"loader": [(x, y)]}
    loss = cross_entropy
    if rank == 1 and what == "empty":
        options["loader"] = []
    if rank == 1 and what == "filter":
        options["parameters"] = ["0.*", "nothing"]
    if what == "not finite":
        loss = nn.functional.mse_loss
        y = torch.full((11, 3), float("nan") if rank == 1 else 1.0, dtype=torch.float64)
        options["loader"] = [(x, y)]
    if rank == 1 and what == "detached":
        loss = lambda output, target: cross_entropy(output.detach(), target)  # noqa: E731
    if what == "mixed":
        options["chunk"] = 4
        if rank == 1:
            loss = nn.CrossEntropyLoss(reduction="sum")
    try:
        operator = Hessian(model, loss, process_group=distributed.group.WORLD, **options)
        operator @ torch.ones(operator.size, dtype=torch.float64)
    except (ArithmeticError, RuntimeError, ValueError) as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    ("what", "kinds", "message"),
    [
        ("empty", ("RuntimeError", "ValueError"), "loader yielded no batch"),
        ("filter", ("RuntimeError", "ValueError"), "'nothing' matches none"),
        ("not finite", ("NonFiniteProduct", "NonFiniteProduct"), "the loss is not finite"),
        ("detached", ("RuntimeError", "ValueError"), "does not depend on any trainable"),
        ("mixed", ("RuntimeError", "ValueError"), "chunk= changes the loss"),
    ],
)
def test_an_error_of_one_rank_is_raised_by_all(two, what, kinds, message):
    first, second = two.run(refused, what)
    assert (first[0], second[0]) == kinds
    assert first[1].startswith("rank 1 of process_group failed")
    assert message in second[1]


def wrapped():
    pair = batches()[0]
    parallel = DistributedDataParallel(network())
    around = torch.compile(parallel, backend="eager")
    inside = DistributedDataParallel(torch.compile(network(), backend="eager"))
    operators = [Hessian(m, cross_entropy, batch=pair) for m in (network(), around, inside)]
    return [(o.about.names, o @ torch.ones(o.size, dtype=torch.float64)) for o in operators]


def test_models_are_unwrapped_in_any_order(two):
    for plain, *others in two.run(wrapped):
        for names, product in others:
            assert names == plain[0]
            assert torch.equal(product, plain[1])
