"""`distributed=`: its values, what is refused, and a process that dies."""

import copy
import os
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed, nn

from neumann import Neumann
from tests.support.divided_matrices import Layout, alone, make_optimizer, stepped, value
from tests.support.programs import copying_context

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("mode", [None, "owner", "replicated"])
def test_one_process_needs_no_group(mode):
    ours, expected = alone(distributed=mode), alone()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_a_wrong_value_is_refused():
    p = nn.Parameter(torch.ones(2, 2))
    wanted = r"distributed must be None, 'owner' or 'replicated', got 'all'"
    with pytest.raises(ValueError, match=wanted):
        Neumann([p], lr=0.1, precondition="spectral", distributed="all")
    with pytest.raises(ValueError, match="whole optimizer, so pass it to Neumann"):
        Neumann([{"params": [p], "distributed": "owner"}], lr=0.1, precondition="spectral")


def misused():
    world = distributed.group.WORLD
    sharded = Layout("flat").parameters.values()
    with pytest.raises(ValueError, match="is for replicas, but some parameters are DTensors"):
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


def missing_group():
    p = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="that are not DTensors needs process_group="):
        Neumann([p], 0.1, precondition="spectral", distributed="owner")
    sharded = Layout("flat").parameters.values()
    given = {"process_group": distributed.group.WORLD, "distributed": "replicated"}
    with pytest.raises(ValueError, match="distributed='replicated' with process_group="):
        Neumann(sharded, 0.1, precondition="spectral", **given)


def test_owners_of_plain_parameters_need_a_group(two):
    two.run(missing_group)


@pytest.mark.parametrize("mode", [None, "owner"])
def test_a_group_that_is_none_is_refused(mode):
    p = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(TypeError, match=r"a torch\.distributed group .* got 'world'"):
        Neumann([p], 0.1, precondition="spectral", process_group="world", distributed=mode)


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


def frozen_apart(kind, freeze, steps):
    """Rank 1 freezes a matrix that rank 0 trains, before the first step or later."""
    layout = Layout(kind)
    optimizer = make_optimizer(layout.parameters, cubic=0, repulsive=0, **layout.options)
    stepped(optimizer, layout.parameters, layout.place, range(steps))
    number = distributed.get_rank()
    freeze(layout.parameters, number)
    before = layout.whole()
    with pytest.raises(RuntimeError, match="or have frozen different ones"):
        optimizer.step()
    assert all(torch.equal(before[name], w) for name, w in layout.whole().items())
    freeze(layout.parameters, 0)  # now on both: the next steps are taken
    for p in layout.parameters.values():
        p.grad = None if p.grad is None and not p.requires_grad else torch.ones_like(p)
    optimizer.step()
    return optimizer.diagnostics().step


def freeze_one(parameters, rank):
    """Of the same shape: the processes would mix them up."""
    for number, name in enumerate(["a", "b"]):
        parameters[name].requires_grad_(number != rank)
        parameters[name].grad = None


def freeze_all(parameters, rank):
    """Then this process would have nothing to exchange."""
    for p in parameters.values():
        p.requires_grad_(rank == 0)
        p.grad = None


def leave_a_gradient(parameters, rank):
    """Both have frozen it, but one still has a gradient, which a step would use."""
    p = parameters["b"].requires_grad_(False)
    p.grad = torch.ones_like(p) if rank else None


@pytest.mark.parametrize("kind", ["flat", "ddp"])
@pytest.mark.parametrize("freeze", [freeze_one, freeze_all, leave_a_gradient])
@pytest.mark.parametrize("steps", [0, 2])
def test_processes_that_freeze_different_parameters_are_refused(two, kind, freeze, steps):
    assert two.run(frozen_apart, kind, freeze, steps) == [steps + 1] * 2


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
