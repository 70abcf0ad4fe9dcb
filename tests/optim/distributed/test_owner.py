"""Each matrix is orthogonalized by one process, and all processes have the weights of one alone."""

import copy
import os
import time
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from neumann import Neumann
from neumann.optim.preconditioners import NAMED, Momentum
from neumann.optim.preconditioners.apply import precondition
from tests.support.divided_matrices import (
    LAYOUTS,
    MATRICES,
    STEPS,
    Layout,
    alone,
    largest_difference,
    make_optimizer,
    spread,
    stepped,
    value,
)
from tests.support.programs import copying_context

TOLERANCE = 1e-6  # Newton–Schulz works in float32, in batches that may differ


# ------------------------------------------------------------------ the same weights, less work


@pytest.mark.parametrize("kind", ["flat", "columns", "ddp"])
def test_two_processes_share_the_work(two, kind):
    check_shared_work(two, kind)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_four_processes_share_the_work(four, kind):
    check_shared_work(four, kind)


def check_shared_work(ranks, kind):
    expected = alone()
    for round_bytes in (0, 2**25):
        answers = ranks.run(spread, kind, round_bytes=round_bytes)
        for ours, counts, (plan,) in answers:
            assert largest_difference(ours, expected) < TOLERANCE
            assert counts["bytes"] == STEPS * plan.bytes_sent
            assert (len(plan.rounds) > 1) == (round_bytes == 0)
        # Each exactly once; "a" holds two.
        assert sum(c["matrices"] for _, c, _ in answers) == STEPS * (MATRICES + 1)
        owned = [i for _, _, (plan,) in answers for i in plan.owned]
        assert sorted(owned) == list(range(MATRICES))
        assert sum(plan.bytes_sent for _, _, (plan,) in answers) > 0


def test_replicated_matrices_are_handled_by_all(two):
    expected = alone()
    for ours, counts, plans in two.run(spread, "flat", distributed="replicated"):
        assert largest_difference(ours, expected) < TOLERANCE
        assert counts == {"matrices": STEPS * (MATRICES + 1), "bytes": 0, "collectives": 0}
        assert plans == []


@pytest.mark.parametrize("kind", ["flat", "hybrid", "ddp"])
def test_fewer_matrices_than_processes(four, kind):
    names = ["tall", "short", "vector"]
    expected = alone(names)
    answers = four.run(spread, kind, names)
    for ours, _, _ in answers:
        assert largest_difference(ours, expected) < TOLERANCE
    assert sorted(c["matrices"] for _, c, _ in answers) == [0, 0, STEPS, STEPS]


# ------------------------------------------------------------------ gradients that are missing


@pytest.mark.parametrize("kind", ["flat", "ddp"])
def test_a_parameter_without_a_gradient(two, kind):
    absent = ("b", "tall", "vector")
    expected = alone(absent=absent)
    for ours, _, _ in two.run(spread, kind, absent=absent):
        assert largest_difference(ours, expected) < TOLERANCE


def missing_on_one():
    """Rank 1 has no gradient of its rows of "b": they count as zeros."""
    layout = Layout("flat")
    optimizer = make_optimizer(layout.parameters, lr=0.1, warmup_steps=9)
    p = layout.parameters
    for name in p:
        p[name].grad = layout.place(name, value(name, 1))
    before = layout.whole()["b"]
    if distributed.get_rank() == 1:
        p["b"].grad = None
    optimizer.step()
    return before, layout.whole()["b"]


def test_a_gradient_missing_on_one_process_counts_as_zero(two):
    gradient = value("b", 1)
    gradient[3:] = 0
    scaled = gradient * (1 + NAMED["spectral"].before.decay)
    (direction,) = NAMED["spectral"].apply([scaled], [{}])
    for before, after in two.run(missing_on_one):
        assert torch.allclose(after[:3], before[:3] - 0.1 * direction[:3], atol=1e-6)
        assert torch.equal(after[3:], before[3:])


# ------------------------------------------------------------------ skipped steps


def skipped(kind):
    """P's state under a flag on the device, and a NaN of one rank in a step."""
    layout = Layout(kind)
    optimizer = make_optimizer(layout.parameters, skip_nonfinite=True, **layout.options)
    stepped(optimizer, layout.parameters, layout.place, range(2))

    def remember():
        states = [optimizer.state[p] for p in layout.parameters.values()]
        tensors = [t for s in states for k, t in s.items() if k.startswith("preconditioner_")]
        return [t.to_local().clone() if isinstance(t, DTensor) else t.clone() for t in tensors]

    before, changed = remember(), []
    for flag in (1.0, 0.0):
        groups = optimizer._gather()
        found, _ = precondition(groups, None, torch.tensor(flag), optimizer._exchange)
        assert all(g is not None for group in found for g in group.gradients)
        changed.append(not all(map(torch.equal, before, remember())))
    weights = layout.whole()
    if distributed.get_rank() == 1:
        gradient = layout.parameters["ragged"].grad
        (gradient.to_local() if kind == "flat" else gradient).fill_(float("nan"))
    optimizer.step()
    same = all(torch.equal(weights[n], w) for n, w in layout.whole().items())
    return changed, same, optimizer.diagnostics().skipped


@pytest.mark.parametrize("kind", ["flat", "ddp"])
def test_a_skipped_step_leaves_state_and_weights(two, kind):
    for changed, same, count in two.run(skipped, kind):
        assert changed == [False, True]
        assert same
        assert count == 1


# ------------------------------------------------------------------ checkpoints


def continued(kind, first, second):
    """A run that stays with one choice, and one that loads its checkpoint under the other."""
    ours, theirs = Layout(kind), Layout(kind)
    optimizer = make_optimizer(ours.parameters, **{**ours.options, "distributed": first})
    stepped(optimizer, ours.parameters, ours.place, range(3))
    group = {} if second == "replicated" else theirs.options
    other = make_optimizer(theirs.parameters, **{**group, "distributed": second})
    with torch.no_grad():
        for name, p in theirs.parameters.items():
            p.copy_(ours.parameters[name])
    other.load_state_dict(optimizer.state_dict())
    assert other.distributed == second
    for each, layout in ((optimizer, ours), (other, theirs)):
        stepped(each, layout.parameters, layout.place, range(3, STEPS))
    return largest_difference(ours.whole(), theirs.whole())


@pytest.mark.parametrize("kind", ["flat", "hybrid", "ddp"])
def test_a_checkpoint_continues_under_the_other_choice(four, kind):
    for difference in four.run(continued, kind, "owner", "replicated"):
        assert difference < TOLERANCE
    if kind != "ddp":  # whose "replicated" with a process group is something else
        for difference in four.run(continued, kind, "replicated", "owner"):
            assert difference < TOLERANCE


# ------------------------------------------------------------------ what is not divided


@dataclass(frozen=True)
class Remembering:
    """Divides by a moving mean of the whole matrix's norm, which every process must know."""

    name = "remembering"
    before = Momentum()

    def elementwise(self, parameter):
        return False

    def create(self, parameter):
        return {"norm": torch.ones((), dtype=torch.float64)}

    def apply(self, gradients, states):
        for g, state in zip(gradients, states, strict=True):
            state["norm"].mul_(0.9).add_(0.1 * g.norm())
        return [g / s["norm"] for g, s in zip(gradients, states, strict=True)]


def remembering():
    names = ["b", "short"]
    layout = Layout("flat", names)
    optimizer = make_optimizer(layout.parameters, names, precondition=Remembering())
    stepped(optimizer, layout.parameters, layout.place)
    return layout.whole(), optimizer._exchange.parts


def test_a_preconditioner_with_state_of_whole_matrices_runs_on_all(two):
    expected = alone(["b", "short"], precondition=Remembering())
    for ours, parts in two.run(remembering):
        assert parts == []
        assert largest_difference(ours, expected) < TOLERANCE


def strided():
    """As FSDP2 over tensor parallelism lays out rows."""
    mesh = init_device_mesh("cpu", (2, 2))
    parts = value("a", 0)[:4].chunk(4)
    mine = parts[[0, 2, 1, 3][distributed.get_rank()]].clone()
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    p = nn.Parameter(DTensor.from_local(mine, mesh, placements, run_check=False))
    plain = nn.Parameter(distribute_tensor(value("b", 0), mesh, (Shard(0), Replicate())))
    optimizer = Neumann([p, plain], lr=0.1, precondition="spectral", warmup_steps=9)
    for each in (p, plain):
        each.grad = each.detach().clone()
    optimizer.step()
    return [part.plan.owned for part in optimizer._exchange.parts], p.to_local().detach()


def test_strided_shards_are_left_to_all(four):
    answers = four.run(strided)
    assert sum(len(owned) for (owned,), _ in answers) == 1  # the plain layout
    w = value("a", 0)[:4]
    (direction,) = NAMED["spectral"].apply([w * (1 + NAMED["spectral"].before.decay)], [{}])
    found = torch.cat([answers[rank][1] for rank in (0, 2, 1, 3)])
    assert torch.allclose(found, w - 0.1 * direction, atol=1e-6)


# ------------------------------------------------------------------ the option


@pytest.mark.parametrize("mode", [None, "owner", "replicated"])
def test_one_process_needs_no_group(mode):
    ours, expected = alone(distributed=mode), alone()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_a_wrong_value_is_refused():
    p = nn.Parameter(torch.ones(2, 2))
    wanted = r"distributed must be None, 'owner' or 'replicated', got 'all'"
    with pytest.raises(ValueError, match=wanted):
        Neumann([p], lr=0.1, precondition="spectral", distributed="all")
    with pytest.raises(ValueError, match="pass distributed to Neumann itself"):
        Neumann([{"params": [p], "distributed": "owner"}], lr=0.1, precondition="spectral")


def misused():
    world = distributed.group.WORLD
    sharded = Layout("flat").parameters.values()
    with pytest.raises(ValueError, match="are replicas, but there are DTensors"):
        Neumann(sharded, 0.1, precondition="spectral", process_group=world, distributed="owner")
    with pytest.raises(ValueError, match="at least one parameter"):
        Neumann(
            [{"params": []}],
            0.1,
            precondition="spectral",
            process_group=world,
            distributed="owner",
        )


def test_replicas_must_be_whole_and_have_parameters(two):
    two.run(misused)


def divided_twice():
    """Each process has another part of the parameters, as under ZeRO."""
    p = nn.Parameter(value(["b", "ragged"][distributed.get_rank()], 0))
    world = distributed.group.WORLD
    optimizer = Neumann([p], 0.1, precondition="spectral", process_group=world, distributed="owner")
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="the processes have different parameters"):
        optimizer.step()
    other = copy.deepcopy(optimizer)
    return other.distributed, other.process_group is world


def test_processes_with_different_parameters_are_refused(two):
    assert two.run(divided_twice) == [("owner", True)] * 2


# ------------------------------------------------------------------ a process that dies


def outlive(rank, store, pipe):
    """Rank 1 ends before its third step; the other has to notice."""
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=20),
    )
    layout = Layout("flat")
    optimizer = make_optimizer(layout.parameters, cubic=0, repulsive=0)
    stepped(optimizer, layout.parameters, layout.place, range(2))
    if rank == 1:
        os._exit(0)
    weights = [p.to_local().clone() for p in layout.parameters.values()]
    started = time.monotonic()
    try:
        optimizer.step()
        pipe.send((None, 0, False))
    except RuntimeError as error:
        same = all(
            torch.equal(old, p.to_local())
            for old, p in zip(weights, layout.parameters.values(), strict=True)
        )
        pipe.send((str(error), time.monotonic() - started, same))


def test_a_dead_process_is_an_error_for_the_others(tmp_path):
    context = copying_context()
    ours, theirs = context.Pipe()
    processes = [
        context.Process(target=outlive, args=(rank, tmp_path / "store", theirs), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        assert ours.poll(120)
        error, seconds, same = ours.recv()
        assert error
        assert seconds < 25
        assert same  # the update had not begun
    finally:
        for process in processes:
            process.kill()
            process.join()
