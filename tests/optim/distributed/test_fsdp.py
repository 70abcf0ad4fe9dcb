"""FSDP2 and HSDP: sharded parameters move as whole ones do, and know when they do not."""

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from neumann import Neumann
from tests.support.oracle_runs import IMPLEMENTATIONS
from tests.support.sharding import FLAT, HYBRID, counted_reductions, needs_fsdp, own_share, sharded
from tests.support.small_training import (
    OPTIONS,
    STEPS,
    batch,
    distance,
    furthest,
    implementation_of,
    loss_of,
    network,
    outcome,
    train,
)
from tests.support.small_training import trained as trained_alone

pytestmark = needs_fsdp


# ------------------------------------------------------------------ trajectories


def trained(shape, implementation, steps, dtype, options):
    with implementation_of(implementation) as flags:
        model, optimizer = sharded(shape, dtype, **flags, **options)
        with counted_reductions() as reductions:
            train(model, optimizer, range(steps), own_share)
    for group in optimizer.param_groups:
        for p in group["params"]:
            for key in ("iterate", "offset"):
                state = optimizer.state[p][key]
                assert isinstance(state, DTensor)
                assert state.placements == p.placements
                assert state.to_local().shape == p.to_local().shape
    sizes = [p.to_local().numel() for group in optimizer.param_groups for p in group["params"]]
    return outcome(optimizer), optimizer.diagnostics().as_dict(), len(reductions), sizes


@pytest.mark.parametrize("implementation", ["chosen", *IMPLEMENTATIONS])
def test_two_ranks_equal_one_process(two, implementation):
    steps = 10 if implementation == "triton" else STEPS
    with implementation_of(implementation) as flags:
        alone = outcome(trained_alone(steps, **flags))
    for ours, diagnostics, reductions, _ in two.run(
        trained, FLAT, implementation, steps, torch.float64, {}
    ):
        assert furthest(ours, alone) < 1e-12
        assert (diagnostics["step"], diagnostics["phase"]) == (steps, "iterate")
        assert reductions == steps


@pytest.mark.parametrize("shape", [FLAT, HYBRID])
def test_four_ranks_equal_one_process(four, shape):
    """Uneven and empty shards, and replicas that are not counted twice."""
    for options in ({}, {"skip_nonfinite": True, "weight_decay": 0.1, "foreach": True}):
        alone = outcome(trained_alone(**options))
        answers = four.run(trained, shape, "chosen", STEPS, torch.float64, options)
        for ours, _, reductions, _ in answers:
            assert furthest(ours, alone) < 1e-12
            # One a step, with which the flag of skip_nonfinite travels; and one among replicas.
            shared = shape == HYBRID and "skip_nonfinite" in options
            assert reductions == (2 * STEPS if shared else STEPS)
        if shape == FLAT:
            sizes = list(zip(*(sizes for *_, sizes in answers), strict=True))
            assert any(min(of) == 0 for of in sizes)
            assert any(0 < min(of) < max(of) for of in sizes)


def test_without_forces_nothing_is_reduced(two):
    options = {"cubic": 0.0, "repulsive": 0.0}

    alone = outcome(trained_alone(**options))
    for ours, reductions in two.run(trained_without_forces, options):
        assert furthest(ours, alone) < 1e-12
        assert reductions == 0


def trained_without_forces(options):
    model, optimizer = sharded(**options)
    with counted_reductions() as reductions:
        train(model, optimizer, part=own_share)
    return outcome(optimizer), len(reductions)


def trained_in_bfloat16():
    """bfloat16 to compute with, float32 master weights."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    model = network(torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = Neumann(model.named_parameters(), **OPTIONS)
    train(model, optimizer, part=own_share)
    dtypes = {p.dtype for p in model.parameters()} | {
        optimizer.state[p]["iterate"].dtype for p in model.parameters()
    }
    return outcome(optimizer), dtypes


def test_mixed_precision_keeps_float32_master_weights(two):
    alone = outcome(trained_alone(dtype=torch.float32))
    for ours, dtypes in two.run(trained_in_bfloat16):
        assert dtypes == {torch.float32}
        assert 0 < distance(ours, alone) < 0.02  # what bfloat16 gradients cost


# ------------------------------------------------------------------ overflow


def overflowed(shape, implementation):
    """A NaN in one element, on one rank alone: with replicas, the others do not have it."""
    with implementation_of(implementation) as flags:
        model, optimizer = sharded(shape, skip_nonfinite=True, **flags)
        seen = []
        for step in range(12):
            optimizer.zero_grad()
            loss_of(model, own_share(batch(step))).backward()
            if step in (1, 5, 9):
                gradient = model[0].weight.grad.to_local()
                if gradient.numel() and is_last():
                    gradient[0, 0] = float("nan")
            before = held_here(optimizer)
            optimizer.step()
            seen.append(all(map(torch.equal, before, held_here(optimizer))))
        return seen, optimizer.diagnostics().as_dict(), outcome(optimizer)


def held_here(optimizer):
    """This rank's part of everything; every rank has some rows of the first layer."""
    kinds = (optimizer.param_groups[0]["params"], optimizer.eval_params().values())
    tensors = [*kinds[0], *kinds[1], *optimizer.average_params().values()]
    return [tensor.detach().to_local().clone() for tensor in tensors]


def is_last():
    """Whether this is the one rank whose shard overflows, in one replica if there are several."""
    return distributed.get_rank() == distributed.get_world_size() - 1


@pytest.mark.parametrize("shape", [FLAT, HYBRID])
def test_an_overflow_in_one_shard_is_skipped_by_all(two, four, shape):
    implementations = ["chosen", "foreach", "triton"] if shape == FLAT else ["chosen"]
    reference = Neumann((model := network()).named_parameters(), **OPTIONS)
    for step in range(12):
        if step not in (1, 5, 9):
            reference.zero_grad()
            loss_of(model, batch(step)).backward()
            reference.step()
    for implementation in implementations:
        ranks = two if implementation == "triton" else four  # it is interpreted: slow
        for seen, diagnostics, ours in ranks.run(overflowed, shape, implementation):
            assert [step for step in range(12) if seen[step]] == [1, 5, 9]
            assert (diagnostics["step"], diagnostics["skipped"]) == (9, 3)
            assert furthest(ours, outcome(reference)) < 1e-12


# ------------------------------------------------------------------ evaluation


def evaluated():
    """Forward passes in both modes, between training steps: what does the model compute with?"""
    model, optimizer = sharded()
    train(model, optimizer, range(10), own_share)
    x = batch(99)
    with torch.no_grad():
        training = model(x)
        whole = {n: t.full_tensor() for n, t in optimizer.eval_params().items()}
        with optimizer.evaluating():
            evaluation = model(x)
            held = {n: p.full_tensor() for n, p in model.named_parameters() if hasattr(p, "mesh")}
        again = model(x)
    train(model, optimizer, range(10, STEPS), own_share)
    expected = torch.func.functional_call(network(), whole, (x,))
    return training, evaluation, again, expected, held, whole, outcome(optimizer)


def test_evaluation_sees_the_evaluation_weights_and_training_its_own(two):
    """FSDP keeps the root's gathered weights after a forward pass without a backward one."""
    for training, evaluation, again, expected, held, whole, ours in two.run(evaluated):
        assert torch.allclose(evaluation, expected, rtol=1e-12)
        assert not torch.allclose(evaluation, training, rtol=1e-3)
        assert torch.equal(training, again)
        assert all(torch.equal(held[name], whole[name]) for name in held)
        assert furthest(ours, outcome(trained_alone())) < 1e-12


# ------------------------------------------------------------------ parameters replaced


def replaced():
    """The optimizer is built first and given the sharded parameters later, as Accelerate does."""
    model = network()
    optimizer = Neumann(model.named_parameters(), **OPTIONS)
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train(model, optimizer, part=own_share)
    assert set(optimizer.state) == set(model.parameters())
    return outcome(optimizer)


def test_parameters_sharded_after_the_optimizer_was_built(two):
    for ours in two.run(replaced):
        assert furthest(ours, outcome(trained_alone())) < 1e-12


# ------------------------------------------------------------------ resumption


def resumed(implementation):
    """An uninterrupted run, and one that loads its state dict, from step 8 on."""
    with implementation_of(implementation) as flags:
        runs = [sharded(**flags)]
        for step in range(12):
            if step == 8:
                model, optimizer = runs[0]
                weights = {n: p.detach().clone() for n, p in model.state_dict().items()}
                runs.append(sharded(**flags))
                runs[1][0].load_state_dict(weights)
                runs[1][1].load_state_dict(optimizer.state_dict())
            for model, optimizer in runs:
                train(model, optimizer, range(step, step + 1), own_share)
        return [outcome(optimizer) for _, optimizer in runs]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_resumed_run_has_the_same_bits(two, implementation):
    for whole, again in two.run(resumed, implementation):
        assert all(torch.equal(again[name], whole[name]) for name in whole)


def refused():
    model, _ = sharded()
    with pytest.raises(RuntimeError, match=r"differentiable=True cannot run here.*sharded"):
        Neumann(model.parameters(), **OPTIONS, differentiable=True)


def test_layouts_that_cannot_be_sharded_are_refused(two):
    two.run(refused)


def first_generation():
    model = FullyShardedDataParallel(network(), use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"FSDP1.*fully_shard"):
        Neumann(model.parameters(), **OPTIONS)


def test_fsdp_of_the_first_generation_is_refused(two):
    two.run(first_generation)


def forgotten():
    """The optimizer is built first, and nobody gives it the sharded parameters."""
    model = network()
    optimizer = Neumann(model.named_parameters(), **OPTIONS)
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    with pytest.warns(UserWarning, match="found no gradient at all.*after fully_shard"):
        train(model, optimizer, part=own_share)


def test_an_optimizer_without_the_sharded_parameters_warns(two):
    two.run(forgotten)


def saved_after_a_replacement():
    """As Accelerate resumes: parameters replaced, then state asked for before any step."""
    model = network()
    optimizer = Neumann(model.named_parameters(), **OPTIONS)
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    optimizer.param_groups[0]["params"] = list(model.parameters())
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert all(isinstance(entry["iterate"], DTensor) for entry in state.values())
    return optimizer.diagnostics().step


def test_state_asked_for_after_a_replacement(two):
    assert two.run(saved_after_a_replacement) == [0, 0]


def materialized():
    """Built on the meta device, sharded, given to the optimizer, and only then made real."""
    with torch.device("meta"):
        model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    optimizer = Neumann(model.named_parameters(), **OPTIONS)
    model.to_empty(device="cpu")
    whole = {name: p.detach() for name, p in network().named_parameters()}
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, whole, options=options)
    train(model, optimizer, part=own_share)
    return outcome(optimizer)


def test_a_meta_model_materialized_after_the_optimizer(two):
    for ours in two.run(materialized):
        assert furthest(ours, outcome(trained_alone())) < 1e-12


def compiled():
    """Without fullgraph a refused trace falls back to an eager step."""
    model, optimizer = sharded()
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, own_share(batch(number))).backward()
        step()
    torch._dynamo.reset()  # which remembers a frame that it has given up
    with pytest.raises(Exception, match="divided among processes"):
        torch.compile(optimizer.step, backend="eager", fullgraph=True)()
    return outcome(optimizer)


def test_a_compiled_step_falls_back_or_is_refused(two):
    for ours in two.run(compiled):
        assert furthest(ours, outcome(trained_alone())) < 1e-12


# ------------------------------------------------------------------ without forces


def distance_after_a_load():
    model, optimizer = sharded(FLAT, torch.float64, cubic=0.0, repulsive=0.0)
    train(model, optimizer, range(4), own_share)
    optimizer.load_state_dict(optimizer.state_dict())
    found = [optimizer.diagnostics().distance]
    train(model, optimizer, range(4, 6), own_share)
    return [*found, optimizer.diagnostics().distance]


def test_without_forces_the_distance_is_zero_after_a_load_too(two):
    for found in two.run(distance_after_a_load):
        assert found == [0.0, 0.0]
