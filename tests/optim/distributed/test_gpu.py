"""Training stacks on a GPU. The last real output is kept under results/gpu-tests.txt.

One GPU is enough: NCCL with a group of one, and gloo, which adds up CUDA tensors, with two.
"""

from functools import partial

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from neumann import Neumann
from tests.support import divided_matrices
from tests.support.process_group import ProcessGroup
from tests.support.small_training import (
    BATCH,
    OPTIONS,
    STEPS,
    batch,
    distance,
    furthest,
    loss_of,
    network,
    outcome,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def alone():
    ranks = ProcessGroup(1, "cpu:gloo,cuda:nccl")
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def both():
    ranks = ProcessGroup(2)
    yield ranks
    ranks.stop()


def data(step, dtype=torch.float64):
    return batch(step, dtype).cuda()


def trained(steps=STEPS, dtype=torch.float64, **options):
    """One process, one GPU, the fused kernel unless the options say otherwise."""
    model = network(dtype).cuda()
    optimizer = Neumann(model.named_parameters(), **{**OPTIONS, **options})
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, data(step, dtype)).backward()
        optimizer.step()
    return optimizer


def on_host(named):
    return {name: tensor.cpu() for name, tensor in named.items()}


# ------------------------------------------------------------------ FSDP2


def sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = network().cuda()
    fully_shard(model, mesh=init_device_mesh("cuda", (distributed.get_world_size(),)))
    return model, Neumann(model.named_parameters(), **OPTIONS)


def trained_with_fsdp():
    model, optimizer = sharded()
    assert optimizer._backend.name == "triton"
    x = data(99)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, data(step)).backward()
        optimizer.step()
        if step == 10:
            with torch.no_grad():
                seen.append(model(x))
                with optimizer.evaluating():
                    seen.append(model(x))
                seen.append(model(x))
    return on_host(outcome(optimizer)), [y.cpu() for y in seen]


def test_fsdp_with_nccl_runs_the_kernel_on_its_shards(alone):
    ((ours, (before, evaluation, after)),) = alone.run(trained_with_fsdp)
    assert furthest(ours, on_host(outcome(trained()))) < 1e-12
    assert torch.equal(before, after)
    assert not torch.allclose(before, evaluation, rtol=1e-3)


def resumed_with_fsdp():
    runs = [sharded()]
    for step in range(STEPS):
        if step == 11:
            model, optimizer = runs[0]
            weights = {name: p.detach().clone() for name, p in model.state_dict().items()}
            runs.append(sharded())
            runs[1][0].load_state_dict(weights)
            runs[1][1].load_state_dict(optimizer.state_dict())
        for model, optimizer in runs:
            optimizer.zero_grad()
            loss_of(model, data(step)).backward()
            optimizer.step()
    (_, optimizer), (_, other) = runs
    return on_host(outcome(optimizer)), on_host(outcome(other))


def test_a_resumed_sharded_run_has_the_same_bits(alone):
    ((whole, resumed),) = alone.run(resumed_with_fsdp)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


# ------------------------------------------------------------------ two processes


def shard_of(tensor):
    """The rows of this rank."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    pieces = tensor.chunk(ranks)
    return (pieces[rank] if rank < len(pieces) else tensor[:0]).clone()


def trained_by_rows():
    """Gradients computed whole on both ranks, weights and state sharded by rows as DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cuda", (distributed.get_world_size(),))
    whole = network().cuda()
    reference = Neumann(whole.named_parameters(), **OPTIONS)

    def spread(tensor):
        return DTensor.from_local(
            shard_of(tensor),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    parameters = {n: nn.Parameter(spread(p.detach())) for n, p in whole.named_parameters()}
    optimizer = Neumann(parameters.items(), **OPTIONS, skip_nonfinite=True)
    assert optimizer._backend.name == "triton"
    for step in range(STEPS):
        reference.zero_grad()
        loss_of(whole, data(step)).backward()
        if step in (2, 7):  # an overflow that one rank sees, and a second try
            for name, p in whole.named_parameters():
                parameters[name].grad = spread(p.grad)
            if distributed.get_rank() == 1:
                parameters["0.weight"].grad.to_local()[0, 0] = float("nan")
            optimizer.step()
        for name, p in whole.named_parameters():
            parameters[name].grad = spread(p.grad)
        optimizer.step()
        reference.step()
    ours = {name: p.to_local().detach().cpu() for name, p in parameters.items()}
    theirs = {name: shard_of(p.detach()).cpu() for name, p in whole.named_parameters()}
    return ours, theirs, optimizer.diagnostics().as_dict()


def test_two_ranks_of_one_gpu_agree_on_the_distance(both):
    for ours, theirs, diagnostics in both.run(trained_by_rows):
        assert all(torch.allclose(ours[n], theirs[n], rtol=1e-12, atol=1e-14) for n in theirs)
        assert (diagnostics["step"], diagnostics["skipped"]) == (STEPS, 2)


def trained_with_zero():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(network().cuda())
    local = partial(Neumann, process_group=distributed.group.WORLD)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), local, **OPTIONS)
    rank = distributed.get_rank()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, data(step).chunk(2)[rank]).backward()
        optimizer.step()
    return {f"w {name}": p.detach().cpu() for name, p in model.module.named_parameters()}


def test_zero(both):
    expected = {k: v for k, v in on_host(outcome(trained())).items() if k.startswith("w ")}
    for ours in both.run(trained_with_zero):
        assert furthest(ours, expected) < 1e-12


# ------------------------------------------------------------------ divided matrices


@pytest.mark.parametrize("kind", ["flat", "columns", "ddp"])
def test_two_ranks_of_one_gpu_share_the_matrices(both, kind):
    """Batches of bfloat16 products: other companions in a batch may round differently."""
    expected = divided_matrices.alone(device="cuda")
    answers = both.run(divided_matrices.spread, kind, device="cuda")
    for ours, counts, (plan,) in answers:
        assert divided_matrices.largest_difference(ours, expected) < 0.01
        assert counts["bytes"] == divided_matrices.STEPS * plan.bytes_sent
    owned = [i for _, _, (plan,) in answers for i in plan.owned]
    assert sorted(owned) == list(range(divided_matrices.MATRICES))


# ------------------------------------------------------------------ one process


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_and_grad_scaler(dtype):
    exact = on_host(outcome(trained(12, torch.float32)))
    model = network(torch.float32).cuda()
    optimizer = Neumann(model.named_parameters(), **OPTIONS)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12, enabled=dtype == torch.float16)
    done = 0
    for attempt in range(14):
        optimizer.zero_grad()
        x = data(done, torch.float32)
        with torch.autocast("cuda", dtype):
            predictions = model(x)
        assert predictions.dtype == dtype
        loss = (predictions.float().squeeze(1) - x.sum(1)).square().mean()
        scaler.scale(loss).backward()
        overflow = scaler.is_enabled() and attempt in (4, 9)
        if overflow:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        done += not overflow
        if done == 12:
            break
    assert optimizer.diagnostics().step == 12
    assert 0 < distance(on_host(outcome(optimizer)), exact) < 0.05


@pytest.mark.parametrize("lr", ["float", "tensor"])
def test_a_compiled_step(lr):
    model = network().cuda()
    rate = torch.tensor(OPTIONS["lr"], device="cuda") if lr == "tensor" else OPTIONS["lr"]
    optimizer = Neumann(model.named_parameters(), **{**OPTIONS, "lr": rate})
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.1 * step))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(optimizer.step, fullgraph=True)
    reference = network().cuda()
    eager = Neumann(reference.named_parameters(), **OPTIONS)
    falls = torch.optim.lr_scheduler.LambdaLR(eager, lambda step: 1.0 / (1 + 0.1 * step))
    for step in range(STEPS):
        for net, opt, take, decay in (
            (model, optimizer, compiled, schedule),
            (reference, eager, eager.step, falls),
        ):
            opt.zero_grad()
            loss_of(net, data(step)).backward()
            take()
            decay.step()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= (1 if lr == "tensor" else 2)
    bound = 1e-6 if lr == "tensor" else 1e-12  # the tensor is float32
    assert furthest(outcome(optimizer), outcome(eager)) < bound


def test_a_captured_training_step_with_autocast():
    """Forward, backward and step as one graph, in half-precision compute, over all phases."""
    model, reference = network(torch.float32).cuda(), network(torch.float32).cuda()
    optimizers = [
        Neumann(net.named_parameters(), **OPTIONS, capturable=True) for net in (model, reference)
    ]
    static = data(0, torch.float32)

    def body(net, optimizer, x):
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = loss_of(net, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in range(3):
            static.copy_(data(step, torch.float32))
            body(model, optimizers[0], static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body(model, optimizers[0], static)
    for step in range(STEPS):
        x = data(step, torch.float32)
        assert len(x) == BATCH
        optimizers[1].param_groups[0]["lr"].fill_(0.05 / (1 + max(step - 2, 0)))
        body(reference, optimizers[1], x)
        if step >= 3:
            optimizers[0].param_groups[0]["lr"].fill_(0.05 / (1 + max(step - 2, 0)))
            static.copy_(x)
            graph.replay()
    ours, theirs = (outcome(optimizer) for optimizer in optimizers)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
