"""Parameters sharded in different ways at once, and the distance over all of them."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from neumann import Neumann
from tests.support.sharding import counted_reductions
from tests.support.small_training import OPTIONS, PRECONDITIONED, implementation_of

# Over a mesh of 2 × 2, as data and tensor parallelism lay parameters out; None is a plain tensor.
PLACEMENTS = {
    "both": (Shard(0), Shard(1)),
    "first": (Shard(0), Replicate()),
    "second": (Replicate(), Shard(0)),
    "neither": (Replicate(), Replicate()),
    "plain": None,
}
SHAPE = (5, 6)
STEPS = 14


def value(name, step):
    seed = list(PLACEMENTS).index(name) * 1000 + step
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def stepped(optimizer, parameters, place, steps=range(STEPS)):
    """Gradients that pull to 0, with noise."""
    for step in steps:
        for name, p in parameters.items():
            whole = p.full_tensor() if isinstance(p, DTensor) else p
            p.grad = place(name, 0.3 * whole.detach() + value(name, step + 1))
        optimizer.step()


def alone(names, **options):
    parameters = {name: nn.Parameter(value(name, 0)) for name in names}
    optimizer = Neumann(parameters.items(), **OPTIONS, **options)
    stepped(optimizer, parameters, lambda name, gradient: gradient)
    return {name: p.detach() for name, p in parameters.items()}, optimizer.diagnostics().distance


def placed(name, tensor, mesh):
    placements = PLACEMENTS[name]
    return tensor if placements is None else distribute_tensor(tensor, mesh, placements)


def spread(names, implementation, partial, **options):
    """The same with every parameter laid out in its own way."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def place(name, gradient):
        if partial and PLACEMENTS[name] is not None:
            # As it comes out of a backward pass that has not been reduced yet.
            mine = gradient if distributed.get_rank() == 0 else torch.zeros_like(gradient)
            pending = [torch.distributed.tensor.Partial()] * 2
            return DTensor.from_local(mine, mesh, pending, run_check=False)
        return placed(name, gradient, mesh)

    parameters = {name: nn.Parameter(placed(name, value(name, 0), mesh)) for name in names}
    with implementation_of(implementation) as flags:
        optimizer = Neumann(parameters.items(), **OPTIONS, **flags, **options)
        with counted_reductions() as reductions:
            stepped(optimizer, parameters, place)
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in parameters.items()}
    known = optimizer.diagnostics().distance  # as the last step saw it
    return {name: p.detach() for name, p in whole.items()}, known, len(reductions)


@pytest.mark.parametrize(
    ("names", "dimensions", "implementation"),
    [
        (["both"], 2, "chosen"),
        (["first"], 1, "chosen"),
        (["second", "neither"], 1, "chosen"),
        (["neither", "plain"], 0, "chosen"),
        (["first", "plain"], 1, "chosen"),
        *((list(PLACEMENTS), 2, name) for name in ("chosen", "single", "foreach")),
    ],
)
def test_one_reduction_for_each_sharded_dimension(four, names, dimensions, implementation):
    expected, _ = alone(names)
    for ours, _, reductions in four.run(spread, names, implementation, False):
        assert reductions == dimensions * STEPS
        for name in names:
            assert torch.allclose(ours[name], expected[name], rtol=1e-12, atol=1e-13)


def test_gradients_that_are_not_reduced_yet(four):
    names = ["both", "first"]
    expected, _ = alone(names)
    for ours, _, _ in four.run(spread, names, "chosen", True):
        for name in names:
            assert torch.allclose(ours[name], expected[name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("name", PRECONDITIONED)
def test_preconditioned_layouts_equal_one_process(four, name, partial):
    """A matrix is gathered from any layout, and its direction returns to that layout."""
    names = list(PLACEMENTS)
    expected, _ = alone(names, precondition=name)
    bound = PRECONDITIONED[name]
    for ours, _, _ in four.run(spread, names, "chosen", partial, precondition=name):
        for each in names:
            assert torch.allclose(ours[each], expected[each], rtol=bound, atol=bound)


def fused_on_a_mixture():
    mesh = init_device_mesh("cpu", (2, 2))
    parameters = [nn.Parameter(placed(name, value(name, 0), mesh)) for name in ("both", "first")]
    with (
        implementation_of("triton"),
        pytest.raises(RuntimeError, match=r"fused=True cannot run here.*sharded in different ways"),
    ):
        Neumann(parameters, **OPTIONS, fused=True)


def test_the_cuda_kernel_refuses_a_mixture(four):
    four.run(fused_on_a_mixture)
