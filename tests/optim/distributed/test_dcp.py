"""torch.distributed.checkpoint: saved on four ranks, loaded on two and on one."""

import copy

import pytest
import torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions

from neumann import Neumann
from tests.support.sharding import FLAT, HYBRID, needs_fsdp, own_share, sharded
from tests.support.small_training import (
    OPTIONS,
    PRECONDITIONED,
    STEPS,
    furthest,
    network,
    outcome,
    train,
)
from tests.support.small_training import trained as trained_alone

# In one process, torch says that it assumes just that.
pytestmark = [
    needs_fsdp,
    pytest.mark.filterwarnings(
        "ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"
    ),
]

STOP = 8  # in the iterate phase, with a reset still to come
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def states(model, optimizer):
    return dict(zip(("model", "optimizer"), dcp.get_state_dict(model, optimizer), strict=True))


def save(path, shape, evaluating, **options):
    """Train to STOP and save; also returns the end of the uninterrupted run."""
    model, optimizer = sharded(shape, **options)
    train(model, optimizer, range(STOP), own_share)
    if evaluating:
        optimizer.eval()
    checkpoint.save(states(model, optimizer), checkpoint_id=path)
    exported = export(model, optimizer)
    optimizer.train()
    train(model, optimizer, range(STOP, STEPS), own_share)
    return outcome(optimizer), exported


def export(model, optimizer):
    """The evaluation weights as a plain state dict, on rank 0."""
    with optimizer.evaluating():
        return copy.deepcopy(dcp.get_model_state_dict(model, options=WHOLE))


def load(model, optimizer, path, evaluating=False):
    if evaluating:
        optimizer.eval()  # a checkpoint gives what it is asked for: so ask for both weights
    loaded = states(model, optimizer)
    checkpoint.load(loaded, checkpoint_id=path)
    dcp.set_state_dict(
        model,
        optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    assert optimizer.training is not evaluating
    assert optimizer.diagnostics().step == STOP
    optimizer.train()


def resumed(path, shape, evaluating, **options):
    torch.manual_seed(1)
    model, optimizer = sharded(shape, **options)
    load(model, optimizer, path, evaluating)
    exported = export(model, optimizer)
    train(model, optimizer, range(STOP, STEPS), own_share)
    return outcome(optimizer), exported


@pytest.mark.parametrize(("shape", "evaluating"), [(FLAT, False), (HYBRID, True)])
def test_four_ranks_then_four_two_and_one(two, four, tmp_path, shape, evaluating):
    path = str(tmp_path / "checkpoint")
    expected = outcome(trained_alone())
    plain = trained_alone(STOP)
    saved = four.run(save, path, shape, evaluating)
    for (whole, _), (ours, _) in zip(
        saved, four.run(resumed, path, shape, evaluating), strict=True
    ):
        assert all(torch.equal(ours[name], whole[name]) for name in whole)  # the same bits
        assert furthest(ours, expected) < 1e-12
    fewer = two.run(resumed, path, FLAT, evaluating)
    assert all(furthest(ours, expected) < 1e-12 for ours, _ in fewer)

    model = network()
    optimizer = Neumann(model.named_parameters(), **OPTIONS)
    load(model, optimizer, path, evaluating)
    exported = {"one": export(model, optimizer), "two": fewer[0][1], "four": saved[0][1]}
    train(model, optimizer, range(STOP, STEPS))
    assert furthest(outcome(optimizer), expected) < 1e-12
    for state_dict in exported.values():
        assert furthest(state_dict, plain.eval_params()) < 1e-12


@pytest.mark.parametrize("name", PRECONDITIONED)
def test_a_preconditioner_resumes_on_as_many_ranks_and_on_fewer(two, four, tmp_path, name):
    path = str(tmp_path / "checkpoint")
    whole = four.run(save, path, FLAT, False, precondition=name)
    again = four.run(resumed, path, FLAT, False, precondition=name)
    for (ours, _), (theirs, _) in zip(again, whole, strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    for ours, _ in two.run(resumed, path, FLAT, False, precondition=name):
        assert furthest(ours, whole[0][0]) < PRECONDITIONED[name]


def test_one_process_then_two(two, tmp_path):
    path = str(tmp_path / "checkpoint")
    model = network()
    optimizer = Neumann(model.named_parameters(), **OPTIONS)
    train(model, optimizer, range(STOP))
    checkpoint.save(states(model, optimizer), checkpoint_id=path)
    for ours, _ in two.run(resumed, path, FLAT, False):
        assert furthest(ours, outcome(trained_alone())) < 1e-12


def mixed_modes(path):
    """A checkpoint of evaluation mode, asked for by an optimizer in training mode."""
    model, optimizer = sharded()
    with pytest.raises(ValueError, match=r"saved in evaluation mode.*call optimizer.eval\(\)"):
        load(model, optimizer, path)


def test_loading_evaluation_mode_into_training_mode_raises(two, tmp_path):
    path = str(tmp_path / "checkpoint")
    two.run(save, path, FLAT, True)
    two.run(mixed_modes, path)


# ------------------------------------------------------------------ without files


def round_trip(options, whole):
    """get and set, before the first step and in the middle; by shards or whole."""
    flags = StateDictOptions(full_state_dict=whole, broadcast_from_rank0=whole, **options)
    results = []
    for stop in (0, STOP):
        model, optimizer = sharded()
        train(model, optimizer, range(stop), own_share)
        got = dcp.get_optimizer_state_dict(model, optimizer, options=flags)
        weights = dcp.get_model_state_dict(model, options=flags)
        assert optimizer.diagnostics().step == stop  # asking for state is not a step
        fresh, other = sharded()
        dcp.set_model_state_dict(fresh, weights, options=flags)
        dcp.set_optimizer_state_dict(fresh, other, got, options=flags)
        assert other.diagnostics().step == stop
        train(fresh, other, range(stop, STEPS), own_share)
        results.append(outcome(other))
    return results


@pytest.mark.parametrize(
    ("options", "whole"),
    [({}, False), ({}, True), ({"flatten_optimizer_state_dict": True}, False)],
)
def test_get_and_set(two, options, whole):
    expected = outcome(trained_alone())
    for results in two.run(round_trip, options, whole):
        assert all(furthest(ours, expected) < 1e-12 for ours in results)


def plain_into_shards(state_dict, weights):
    """What a single process saved with torch.save, and the other way round."""
    model, optimizer = sharded()
    dcp.set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    optimizer.load_state_dict(state_dict)
    train(model, optimizer, range(STOP, STEPS), own_share)
    ours = outcome(optimizer)
    whole = optimizer.state_dict()
    if distributed.get_rank() == 0:
        assert all(entry["distance_squared"].isnan() for entry in whole["state"].values())
    alone = network()
    plain = Neumann(alone.named_parameters(), **OPTIONS)
    plain.load_state_dict(whole)
    return ours, plain.diagnostics().distance


def test_plain_state_dicts_load_into_shards_and_back(two):
    half, full = trained_alone(STOP), trained_alone()
    (group,) = half.param_groups
    weights = dict(zip(group["param_names"], (p.detach() for p in group["params"]), strict=True))
    for ours, distance in two.run(plain_into_shards, half.state_dict(), weights):
        assert furthest(ours, outcome(full)) < 1e-12
        assert distance == pytest.approx(full.diagnostics().distance, rel=1e-12)
