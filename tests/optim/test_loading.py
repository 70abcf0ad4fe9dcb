"""load_state_dict adopts everything or nothing, and nothing that no optimizer could have saved."""

import copy
import math

import pytest
import torch
from torch import nn

from neumann import Neumann
from tests.support.interrupts import count_positions, interrupt_at
from tests.support.oracle_runs import IMPLEMENTATIONS
from tests.support.small_model import STRONG, equal, model_and_optimizer, train, weights


def change_option(name, value):
    def change(saved):
        saved["param_groups"][0][name] = value

    return change


def change_state(name, value):
    def change(saved):
        saved["state"][1][name] = value

    return change


def drop(*path):
    def change(saved):
        for key in path[:-1]:
            saved = saved[key]
        del saved[path[-1]]

    return change


REFUSED = {
    "cubic": (change_option("cubic", math.nan), "group 0 .*cubic must be a finite number.*got nan"),
    "repulsive": (change_option("repulsive", -1.0), "group 0 .*repulsive .*got -1"),
    "bounded": (
        change_option("bounded", "maybe"),
        "group 0 .*bounded must be True or False.*maybe",
    ),
    "lr": (change_option("lr", -1), "group 0 .*lr must be .*got -1"),
    "tensor lr": (change_option("lr", torch.tensor(math.inf)), "group 0 .*lr must be"),
    "momentum": (change_option("momentum", 1.0), "group 0 .*momentum must be in"),
    "average": (change_option("average", 1), "group 0 .*average must be in"),
    "weight decay": (change_option("weight_decay", None), "group 0 .*weight_decay must be"),
    "warm-up": (change_option("warmup_steps", 2.5), "group 0 .*warmup_steps must be a whole"),
    "growth": (change_option("reset_growth", 0.5), "group 0 .*reset_growth must be at least 1"),
    "variables": (change_option("variables", "all"), "group 0 .*variables must be"),
    "dtype": (change_option("state_dtype", torch.int8), "group 0 .*state_dtype must be"),
    "mode": (change_option("training", 3), "group 0 .*training must be True or False, got 3"),
    "P": (change_option("precondition", ["spectral"]), "group 0 .*precondition must be"),
    "flags": (change_option("differentiable", 1), "group 0 .*differentiable must be True"),
    "clock": (change_state("step", torch.tensor(-1)), "step of 0.bias .*at least 0, got -1"),
    "fraction": (change_state("step", torch.tensor(2.5)), "step of 0.bias .*whole number"),
    "two clocks": (change_state("step", torch.tensor(5)), "inconsistent: step is 6 .*, 5 for"),
    "vector": (change_state("step", torch.ones(2)), "step of 0.bias .*got a tensor of shape"),
    "skipped": (change_state("skipped", "x"), "skipped of 0.bias .*got 'x'"),
    "r²": (change_state("distance_squared", torch.tensor(-1.0)), "distance_squared .*at least 0"),
    "μ": (change_state("momentum", torch.tensor(math.nan)), r"momentum of 0.bias .*in \[0, 1\)"),
    "m": (change_state("iterate", 0.0), "iterate of 0.bias .*floating-point tensor, got 0.0"),
    "integers": (change_state("offset", torch.ones(8, dtype=torch.int64)), "offset of 0.bias"),
    "complex": (change_state("iterate", torch.ones(8, dtype=torch.cfloat)), "iterate of 0.bias"),
    "sparse": (change_state("iterate", torch.ones(8).to_sparse()), "iterate of 0.bias .*dense"),
    "shape": (change_state("weights", torch.ones(7)), "0.bias has shape .*its weights"),
    "no state": (drop("state"), "must hold param_groups"),
    "no groups": (drop("param_groups"), "must hold param_groups"),
    "no params": (drop("param_groups", 0, "params"), "must hold param_groups"),
    "names": (change_option("param_names", ["a"]), "must hold param_groups"),
    "twice": (change_option("params", [0, 0, 2, 3]), "lists parameter 0 twice"),
    "entry": (lambda saved: saved["state"].update({1: None}), "must hold param_groups"),
}


def snapshot(optimizer):
    """What a failed load must not touch: the very objects, and what is in them."""
    held = [
        optimizer.param_groups,
        optimizer.state,
        *optimizer.param_groups,
        *(entry for entry in optimizer.state.values()),
    ]
    return held, copy.deepcopy(optimizer.state_dict()), optimizer.training


def is_untouched(optimizer, before):
    held, saved, mode = before
    same = all(a is b for a, b in zip(held, snapshot(optimizer)[0], strict=True))
    now = optimizer.state_dict()
    return (
        same
        and optimizer.training is mode
        and now["param_groups"] == saved["param_groups"]
        and all(
            torch.equal(entry[key], saved["state"][index][key])
            for index, entry in now["state"].items()
            for key in entry
        )
    )


@pytest.mark.parametrize("case", REFUSED)
def test_junk_is_refused_in_one_line_and_changes_nothing(case):
    change, message = REFUSED[case]
    _, optimizer = model_and_optimizer(foreach=False)
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        entry["step"] = torch.tensor(6)
    change(saved)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=message) as caught:
        optimizer.load_state_dict(saved)
    assert "\n" not in str(caught.value)
    assert is_untouched(optimizer, before)


def test_groups_that_disagree_are_refused():
    _, optimizer = model_and_optimizer(foreach=False)
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    groups = [{"params": list(layer.parameters())} for layer in layers]
    optimizer = Neumann(groups, lr=0.1, warmup_steps=0, reset_steps=0)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][1]["cubic"] = 1.0
    with pytest.raises(ValueError, match="cubic must agree across parameter groups"):
        optimizer.load_state_dict(saved)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][1]["lr"] = -1.0
    with pytest.raises(ValueError, match="group 1 of the state dict: lr must be"):
        optimizer.load_state_dict(saved)


def test_no_dict_at_all():
    _, optimizer = model_and_optimizer(foreach=False)
    with pytest.raises(TypeError, match="the state dict must be a dict, got list"):
        optimizer.load_state_dict([])


FAILURES = [
    pytest.param(name, place, marks=[pytest.mark.slow] if name == "triton" else [])
    for name in IMPLEMENTATIONS
    for place in ("check", "rebuilding", "post hook")
    if name != "triton" or place == "rebuilding"  # slow where it is interpreted
]


@pytest.mark.parametrize(("implementation", "place"), FAILURES)
def test_a_failed_load_leaves_the_run_as_it_was(implementation, place, monkeypatch):
    """The next steps have the bits of a run in which nobody tried."""
    options = {**STRONG, **IMPLEMENTATIONS[implementation]}
    model, optimizer = model_and_optimizer(**options)
    alone, other = model_and_optimizer(**options)
    train(model, optimizer, 6)
    train(alone, other, 6)
    donor_model, donor = model_and_optimizer(**{**options, "lr": 0.3, "cubic": 0.01})
    train(donor_model, donor, 9)
    saved = copy.deepcopy(donor.state_dict())

    def fail(*_):
        raise KeyError("on purpose")

    if place == "check":
        saved["param_groups"][0]["capturable"] = "yes"
    elif place == "rebuilding":
        monkeypatch.setattr(optimizer, "_rebuild", fail)
    else:
        optimizer.register_load_state_dict_post_hook(fail)
    with pytest.raises((KeyError, ValueError)):
        optimizer.load_state_dict(saved)
    monkeypatch.undo()
    assert optimizer.diagnostics().as_dict() == other.diagnostics().as_dict()
    train(model, optimizer, 3, start=6)
    train(alone, other, 3, start=6)
    assert equal(weights(model), weights(alone))
    assert equal(optimizer.average_params().values(), other.average_params().values())


@pytest.mark.slow
def test_an_interrupt_at_any_position_of_a_load():
    p = nn.Parameter(torch.ones(3, dtype=torch.float64))
    options = {"lr": 0.1, "warmup_steps": 0, "reset_steps": 0, "foreach": False}
    optimizer, donor = Neumann([p], **options), Neumann([p], **{**options, "lr": 0.7})
    saved = donor.state_dict()
    positions = count_positions(copy.deepcopy(optimizer).load_state_dict, saved)
    before = snapshot(optimizer)
    for position in range(1, positions + 1, 11):
        assert interrupt_at(position, optimizer.load_state_dict, saved)
        if optimizer.param_groups[0]["lr"] == 0.1:
            assert is_untouched(optimizer, before), position
        else:  # only the return was left
            assert position > positions - 11
            return


# ---------------------------------------------------------------------- another machine


@pytest.mark.parametrize(
    "flags",
    [
        {"capturable": True, "fused": True},
        {"capturable": True, "fused": None},
        {"capturable": True},
    ],
)
@pytest.mark.parametrize("own", [{"fused": None}, {"foreach": True}, {"foreach": False}])
def test_a_checkpoint_of_a_gpu_loads_on_a_cpu(flags, own):
    model, optimizer = model_and_optimizer(**own, **STRONG)
    train(model, optimizer, 6)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0] |= {
        "foreach": None,
        **flags,
        "lr": torch.tensor(0.1, dtype=torch.float64),
    }
    fresh, other = model_and_optimizer(**own, **STRONG)
    fresh.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match="cannot be used on this.*keeps foreach=") as caught:
        other.load_state_dict(saved)
    assert len(caught) == 1
    group = other.param_groups[0]
    assert {name: group[name] for name in own} == own
    assert group["capturable"] is False
    assert group["lr"] == 0.1
    assert not isinstance(group["lr"], torch.Tensor)
    train(model, optimizer, 4, start=6)
    train(fresh, other, 4, start=6)
    assert equal(weights(model), weights(fresh))


def test_a_fused_checkpoint_where_nothing_fused_runs(monkeypatch):
    model, optimizer = model_and_optimizer(foreach=True)
    train(model, optimizer, 6)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0] |= {"foreach": None, "fused": True}
    monkeypatch.setattr("neumann.optim.backends.FUSED", [])
    with pytest.warns(UserWarning, match=r"\(fused=True cannot run here: .*keeps foreach=True"):
        optimizer.load_state_dict(saved)
    train(model, optimizer, 1, start=6)


def test_flags_that_run_here_are_adopted(recwarn):
    _, optimizer = model_and_optimizer(foreach=True)
    _, other = model_and_optimizer(foreach=False)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["foreach"] is True
    assert not recwarn.list


def test_names_stay_those_of_the_model_that_loads():
    """A checkpoint of a compiled model, or of DDP, has longer names."""
    model, _ = model_and_optimizer()
    wrapped = torch.compile(model, backend="eager")
    saved = Neumann(wrapped.named_parameters(), lr=0.1, warmup_steps=0, reset_steps=0)
    assert next(iter(saved.eval_params())) == "_orig_mod.0.weight"
    _, optimizer = model_and_optimizer()
    optimizer.load_state_dict(saved.state_dict())
    assert list(optimizer.eval_params()) == [name for name, _ in model.named_parameters()]
    assert optimizer.state_dict()["param_groups"][0]["param_names"][0] == "0.weight"


# ---------------------------------------------------------------------- groups added after a load


def test_a_group_added_after_a_load_shares_what_was_loaded():
    _, optimizer = model_and_optimizer(cubic=0.3, average=0.9, bounded=False)
    fresh, other = model_and_optimizer()
    other.load_state_dict(optimizer.state_dict())
    late = nn.Parameter(torch.ones(3, dtype=torch.float64))
    other.add_param_group({"params": [("late", late)], "lr": 0.7})
    group = other.param_groups[1]
    assert (group["cubic"], group["average"], group["bounded"]) == (0.3, 0.9, False)
    assert group["lr"] == 0.7
    train(fresh, other, 2)
    with pytest.raises(ValueError, match="cubic must agree"):
        other.add_param_group({"params": [("later", nn.Parameter(torch.ones(1)))], "cubic": 0.1})


def test_groups_of_the_constructor_do_not_inherit_from_the_first():
    layers = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    groups = [{"params": [layers[0]], "cubic": 0.3}, {"params": [layers[1]]}]
    with pytest.raises(ValueError, match="cubic must agree"):
        Neumann(groups, lr=0.1, warmup_steps=0, reset_steps=0)
