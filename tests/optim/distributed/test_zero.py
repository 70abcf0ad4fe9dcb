"""ZeroRedundancyOptimizer: each rank steps some of the parameters, and r is over all of them."""

import copy
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from neumann import Neumann
from tests.support.small_training import (
    OPTIONS,
    PRECONDITIONED,
    STEPS,
    batch,
    furthest,
    loss_of,
    network,
    outcome,
    share,
)
from tests.support.small_training import trained as trained_alone

with warnings.catch_warnings():  # importing it, torch warns of its own torch.jit.script
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward


def build(options):
    model = DistributedDataParallel(network())
    local = partial(Neumann, process_group=distributed.group.WORLD)
    return model, ZeroRedundancyOptimizer(model.parameters(), local, **OPTIONS, **options)


def steps(model, optimizer, among):
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    for step in among:
        optimizer.zero_grad()
        loss_of(model, share(batch(step), rank, ranks)).backward()
        optimizer.step()


def weights(model):
    return {f"w {name}": p.detach().clone() for name, p in model.module.named_parameters()}


def evaluated(model, optimizer):
    """Every rank switches what it owns, and hands it to the others."""
    with optimizer.optim.evaluating():
        optimizer._sync_params()
        seen = {f"evaluation {n}": p.detach().clone() for n, p in model.module.named_parameters()}
    optimizer._sync_params()
    return seen


def trained(options):
    model, optimizer = build(options)
    steps(model, optimizer, range(STEPS))
    return {
        **weights(model),
        **evaluated(model, optimizer),
    }, optimizer.optim.diagnostics().as_dict()


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"variables": "elements"}], ids=str)
def test_all_ranks_together_equal_one_process(two, four, options):
    alone = trained_alone(**options)
    expected = {k: v for k, v in outcome(alone).items() if not k.startswith("average")}
    for ranks in (two, four):
        answers = ranks.run(trained, options)
        for ours, diagnostics in answers:
            assert furthest(ours, expected) < 1e-12
            assert diagnostics["step"] == STEPS
        assert len({diagnostics["distance"] for _, diagnostics in answers}) == 1


@pytest.mark.parametrize("name", PRECONDITIONED)
def test_preconditioned_ranks_equal_one_process(two, name):
    alone = outcome(trained_alone(precondition=name))
    expected = {k: v for k, v in alone.items() if not k.startswith("average")}
    for ours, _ in two.run(trained, {"precondition": name}):
        assert furthest(ours, expected) < PRECONDITIONED[name]


def few_parameters():
    """Four ranks and three parameters: one rank has none, and keeps step all the same."""
    p = [torch.nn.Parameter(torch.full((2,), float(i))) for i in range(3)]
    local = partial(Neumann, process_group=distributed.group.WORLD)
    optimizer = ZeroRedundancyOptimizer(p, local, **OPTIONS, skip_nonfinite=True)
    for step in range(8):
        for i, each in enumerate(p):
            each.grad = torch.full((2,), 1.0 + i if step != 5 else float("inf"))
        optimizer.step()
    return torch.stack([each.detach() for each in p]), len(
        optimizer.optim.param_groups[0]["params"]
    )


def test_a_rank_without_parameters(four):
    p = [torch.nn.Parameter(torch.full((2,), float(i))) for i in range(3)]
    alone = Neumann(p, **OPTIONS)
    for _ in range(7):
        for i, each in enumerate(p):
            each.grad = torch.full((2,), 1.0 + i)
        alone.step()
    answers = four.run(few_parameters)
    assert sorted(count for _, count in answers) == [0, 1, 1, 1]
    for ours, _ in answers:
        assert torch.allclose(ours, torch.stack([each.detach() for each in p]), rtol=1e-6)


def resumed(evaluating):
    """Save halfway, load into new objects and continue: equal to an uninterrupted run."""
    model, optimizer = build({})
    steps(model, optimizer, range(10))
    if evaluating:
        optimizer.optim.eval()
    optimizer.consolidate_state_dict(0)
    saved = [copy.deepcopy(optimizer.state_dict()) if distributed.get_rank() == 0 else None]
    distributed.broadcast_object_list(saved, 0)
    parameters = {name: p.detach().clone() for name, p in model.state_dict().items()}
    optimizer.optim.train()
    steps(model, optimizer, range(10, STEPS))

    again, other = build({})
    again.load_state_dict(parameters)
    other.load_state_dict(saved[0])
    if evaluating:
        with pytest.raises(RuntimeError, match=r"call optimizer.train\(\) first"):
            other.step()
        other.optim.train()
        other._sync_params()
    steps(again, other, range(10, STEPS))
    same = [torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)]
    return same, other.optim.diagnostics().as_dict() == optimizer.optim.diagnostics().as_dict()


@pytest.mark.parametrize("evaluating", [False, True])
def test_a_consolidated_state_dict_resumes_with_the_same_bits(two, evaluating):
    # Two ranks, because DDP's first step adds up the gradients of more in another order.
    for same, alike in two.run(resumed, evaluating):
        assert all(same)
        assert alike


def test_one_parameter_at_a_time_in_backward_is_refused():
    model = network()
    _apply_optimizer_in_backward(Neumann, model.parameters(), OPTIONS)
    with pytest.raises(RuntimeError, match="cannot step one parameter at a time inside backward"):
        loss_of(model, batch(0)).backward()


def copied():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = Neumann([p], **OPTIONS, process_group=distributed.group.WORLD)
    p.grad = torch.ones(3)
    optimizer.step()
    assert copy.deepcopy(optimizer).process_group is distributed.group.WORLD
    with pytest.raises(TypeError, match="save its state_dict"):
        pickle.dumps(optimizer)


def test_copies_share_the_process_group_and_pickles_are_refused(two):
    two.run(copied)


# ------------------------------------------------------------------ what changes on one rank alone


def thawed_and_frozen(ranks_are_many):
    """A parameter thawed in step 4, another frozen in step 7; who owns them notices first."""
    p = [torch.nn.Parameter(torch.full((2 + i,), 1.0 + i)) for i in range(5)]
    p[1].requires_grad_(False)
    if ranks_are_many:
        local = partial(Neumann, process_group=distributed.group.WORLD)
        optimizer = ZeroRedundancyOptimizer(p, local, **OPTIONS)
    else:
        optimizer = Neumann(p, **OPTIONS)
    for step in range(14):
        if step == 4:
            p[1].requires_grad_(True)
        if step == 7:
            p[3].requires_grad_(False)
        for each in p:
            each.grad = 0.1 * each.detach() + step if each.requires_grad else None
        optimizer.step()
    return torch.cat([each.detach() for each in p])


def test_parameters_that_thaw_and_freeze(two):
    expected = thawed_and_frozen(False)
    for ours in two.run(thawed_and_frozen, True):
        assert torch.allclose(ours, expected, rtol=1e-6)


def reloaded():
    """Loading into a running optimizer, where one rank owns nothing."""
    p = torch.nn.Parameter(torch.ones(3))
    local = partial(Neumann, process_group=distributed.group.WORLD)
    optimizer = ZeroRedundancyOptimizer([p], local, **OPTIONS)

    def step():
        p.grad = torch.ones(3)
        optimizer.step()

    step()
    optimizer.consolidate_state_dict(0)
    saved = [copy.deepcopy(optimizer.state_dict()) if distributed.get_rank() == 0 else None]
    distributed.broadcast_object_list(saved, 0)
    optimizer.load_state_dict(saved[0])
    step()
    return p.detach().clone()


def test_loading_where_a_rank_owns_nothing(two):
    first, second = two.run(reloaded)
    assert torch.equal(first, second)


def scaled_apart():
    """A scaler's overflow that one stage of a pipeline sees."""
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = Neumann([p], **OPTIONS, process_group=distributed.group.WORLD)
    for step in range(10):
        p.grad = torch.ones(4)
        optimizer.grad_scale = torch.tensor(1.0)
        optimizer.found_inf = torch.tensor(float(step == 6 and distributed.get_rank() == 1))
        optimizer.step()
    return optimizer.diagnostics().step


def test_an_overflow_of_one_stage_is_skipped_by_all(two):
    assert two.run(scaled_apart) == [9, 9]
