"""Each matrix is orthogonalized by one process, and all processes have the weights of one alone."""

from dataclasses import dataclass

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from neumann import Neumann
from neumann.optim.preconditioners import NAMED, Momentum, Spectral
from neumann.optim.preconditioners.apply import precondition
from neumann.optim.preconditioners.matrix_view import MatrixView
from tests.support.divided_matrices import (
    LAYOUTS,
    MATRICES,
    STEPS,
    Layout,
    alone,
    counted,
    largest_difference,
    make_optimizer,
    spread,
    stepped,
    value,
)

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
            assert all(torch.equal(ours[name], w) for name, w in answers[0][0].items())
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


def with_empty_shards(mesh_sizes):
    """One process of each replica has no row of the second matrix."""
    shapes = (8, 8), (1, 8)
    placements = (Replicate(), Shard(0))
    mesh = None if mesh_sizes is None else init_device_mesh("cpu", mesh_sizes)

    def place(tensor):
        return tensor if mesh is None else distribute_tensor(tensor, mesh, placements)

    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(place(torch.randn(s, generator=generator))) for s in shapes]
    optimizer = Neumann(parameters, lr=0.1, precondition=Spectral(scaling="norm"))
    for _ in range(3):
        for p, shape in zip(parameters, shapes, strict=True):
            p.grad = place(torch.randn(shape, generator=generator))
        optimizer.step()
    wholes = [p.detach() if mesh is None else p.detach().full_tensor() for p in parameters]
    return dict(enumerate(wholes))


def test_replicas_with_empty_shards(four):
    expected = with_empty_shards(None)
    for ours in four.run(with_empty_shards, (2, 2)):
        assert largest_difference(ours, expected) < TOLERANCE


def with_experts(is_sharded, experts):
    generator = torch.Generator().manual_seed(0)
    mesh = init_device_mesh("cpu", (4,)) if is_sharded else None

    def draw():
        tensor = torch.randn(experts, 6, 4, generator=generator)
        return tensor if mesh is None else distribute_tensor(tensor, mesh, (Shard(0),))

    p = nn.Parameter(draw())
    optimizer = Neumann([p], lr=0.1, precondition=Spectral(view=MatrixView(stacked=True)))
    with counted() as counts:
        for _ in range(3):
            p.grad = draw()
            optimizer.step()
    return {"p": p.detach().full_tensor() if is_sharded else p.detach()}, counts


@pytest.mark.parametrize("experts", [8, 6])
def test_experts_that_are_sharded_one_by_one_stay_where_they_are(four, experts):
    """If each process has as many; otherwise one process has them all."""
    expected, _ = with_experts(False, experts)
    answers = four.run(with_experts, True, experts)
    for ours, counts in answers:
        assert largest_difference(ours, expected) < TOLERANCE
        assert (counts["collectives"] == 0) == (experts == 8)
    found = [counts["matrices"] for _, counts in answers]
    assert sorted(found) == ([6, 6, 6, 6] if experts == 8 else [0, 0, 0, 18])


def changing(kind, convolves):
    """Dtypes and memory formats beside each other; one is frozen, another joins, P changes."""
    place = (lambda name, x: x) if kind is None else Layout(kind).place
    given = {} if kind is None else Layout(kind).options

    def make(name, dtype=torch.float32):
        return nn.Parameter(place(name, value(name, 0).to(dtype)))

    parameters = {"b": make("b"), "c": make("c", torch.bfloat16), "tall": make("tall")}
    if convolves:
        filters = value("filters", 0).to(memory_format=torch.channels_last)
        parameters["filters"] = nn.Parameter(place("filters", filters))
    optimizer = make_optimizer(parameters, list(parameters), **given)
    for step in range(8):
        if step == 2:
            parameters["b"].requires_grad_(False)
        if step == 4:
            parameters["ragged"] = make("ragged")
            optimizer.add_param_group({"params": [("ragged", parameters["ragged"])]})
        if step == 6:
            optimizer.param_groups[0]["precondition"] = Spectral(scale=0.4)
        for name, p in parameters.items():
            gradient = value(name, step + 1).to(p.dtype)
            if name == "filters":
                gradient = gradient.to(memory_format=torch.channels_last)
            p.grad = place(name, gradient) if p.requires_grad else None
        optimizer.step()
    wholes = {n: p.full_tensor() if kind == "flat" else p for n, p in parameters.items()}
    return {name: p.detach().double() for name, p in wholes.items()}


@pytest.mark.parametrize("kind", ["flat", "ddp"])
def test_what_changes_between_steps(two, kind):
    convolves = kind != "flat"  # DTensors are contiguous
    expected = changing(None, convolves)
    for ours in two.run(changing, kind, convolves):
        assert all(torch.allclose(ours[n], expected[n], rtol=0, atol=1e-6) for n in ours)


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


def scaled(kind, foreach, unscale):
    """A GradScaler; in the second of four steps one rank alone has a gradient that overflowed."""
    layout = Layout(kind)
    given = {**layout.options, "distributed": "owner"}
    optimizer = make_optimizer(layout.parameters, foreach=foreach, **given)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    taken = []
    for step in range(4):
        for name, p in layout.parameters.items():
            p.grad = layout.place(name, 64 * value(name, step + 1))
        scaler.scale(torch.zeros(()))  # which makes it ready
        if step == 1 and distributed.get_rank() == distributed.get_world_size() - 1:
            own = layout.parameters["a"].grad
            (own if kind == "ddp" else own.to_local()).fill_(float("inf"))
        if unscale:
            scaler.unscale_(optimizer)
        before = optimizer.diagnostics().step
        scaler.step(optimizer)
        scaler.update(64.0)
        taken.append(optimizer.diagnostics().step - before)
    return layout.whole(), taken


@pytest.mark.parametrize("kind", ["ddp", "hybrid"])
@pytest.mark.parametrize("foreach", [None, True])
def test_what_a_scaler_finds_on_one_process_is_skipped_by_all(four, kind, foreach):
    for unscale in (False, True):
        answers = four.run(scaled, kind, foreach, unscale)
        for weights, taken in answers:
            assert taken == [1, 0, 1, 1]
            assert largest_difference(weights, answers[0][0]) == 0


def trained_apart():
    """Two trainings side by side, of two replicas each; one of them has a NaN."""
    rank = distributed.get_rank()
    groups = [distributed.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    p = nn.Parameter(value("b", 0))
    optimizer = Neumann(
        [p],
        lr=0.1,
        precondition="spectral",
        skip_nonfinite=True,
        process_group=groups[rank % 2],
        distributed="owner",
    )
    p.grad = torch.full_like(p, float("nan") if rank == 2 else 1.0)
    optimizer.step()
    return optimizer.diagnostics().skipped


def test_trainings_in_other_groups_are_not_skipped(four):
    assert four.run(trained_apart) == [1, 0, 1, 0]


# ------------------------------------------------------------------ checkpoints


def continued(kind, first, second):
    """A run that stays with one choice, and one that loads its checkpoint under the other."""
    ours, theirs = Layout(kind), Layout(kind)
    optimizer = make_optimizer(ours.parameters, **{**ours.options, "distributed": first})
    stepped(optimizer, ours.parameters, ours.place, range(3))
    other = make_optimizer(theirs.parameters, **{**theirs.options, "distributed": second})
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
    for modes in (("owner", "replicated"), ("replicated", "owner")):
        for difference in four.run(continued, kind, *modes):
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
