"""What a parameter group gets where it says nothing, and what it may not say."""

import pytest
import torch
from torch import nn

from neumann import Neumann
from neumann.optim.groups import param_groups


def vectors(count=2):
    return [nn.Parameter(torch.ones(3, 2)) for _ in range(count)]


def test_a_group_brings_the_defaults_of_its_own_preconditioner():
    first, second = vectors()
    groups = [
        {"params": [first], "precondition": "spectral"},
        {"params": [second], "precondition": "diagonal"},
    ]
    optimizer = Neumann(groups, lr=0.1)
    ours = [(g["momentum"], g["decoupled_weight_decay"]) for g in optimizer.param_groups]
    assert ours == [(0.6, True), (0.9, True)]
    for name in ("warmup_steps", "reset_steps", "cubic", "repulsive"):
        assert [group[name] for group in optimizer.param_groups] == [0, 0]
    explicit = Neumann(groups, lr=0.1, momentum=0.8, decoupled_weight_decay=False, cubic=1e-3)
    ours = [(g["momentum"], g["decoupled_weight_decay"]) for g in explicit.param_groups]
    assert ours == [(0.8, False), (0.8, False)]
    assert explicit.param_groups[0]["cubic"] == 1e-3


def test_a_group_without_preconditioner_brings_the_defaults_of_the_paper():
    first, second = vectors()
    groups = [{"params": [first]}, {"params": [second], "precondition": None}]
    optimizer = Neumann(groups, lr=0.1, precondition="spectral")
    assert [g["momentum"] for g in optimizer.param_groups] == [0.6, 0.9]
    assert [g["decoupled_weight_decay"] for g in optimizer.param_groups] == [True, False]


def test_groups_with_and_without_a_preconditioner_need_common_options():
    first, second = vectors()
    groups = [{"params": [first], "precondition": "spectral"}, {"params": [second]}]
    with pytest.raises(ValueError, match="pass warmup_steps, reset_steps, cubic, repulsive to N"):
        Neumann(groups, lr=0.1)
    with pytest.raises(ValueError, match="pass cubic to Neumann"):
        Neumann(groups, lr=0.1, warmup_steps=0, reset_epochs=0, repulsive=0)
    common = {"warmup_steps": 0, "reset_steps": 0, "cubic": 0, "repulsive": 0}
    optimizer = Neumann(groups, lr=0.1, **common)
    assert [g["momentum"] for g in optimizer.param_groups] == [0.6, 0.9]


def test_a_group_that_comes_later():
    first, second = vectors()
    paper = Neumann([first], lr=0.1, warmup_steps=2, reset_steps=3)
    with pytest.raises(ValueError, match="pass cubic, repulsive to Neumann"):
        paper.add_param_group({"params": [second], "precondition": "spectral"})
    assert len(paper.param_groups) == 1
    spectral = Neumann([first], lr=0.1, precondition="spectral")
    spectral.add_param_group({"params": [second], "precondition": "diagonal"})
    assert spectral.param_groups[1]["momentum"] == 0.9


def test_a_group_that_names_no_p_does_not_get_the_papers_form():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    late = nn.Linear(4, 8)
    optimizer = Neumann(param_groups(model), lr=0.1)
    count = len(optimizer.param_groups)
    with pytest.raises(
        ValueError, match=r"set its precondition .*, or take it from neumann\.param_groups"
    ):
        optimizer.add_param_group({"params": list(late.named_parameters(prefix="late"))})
    assert len(optimizer.param_groups) == count
    for group in param_groups(nn.ModuleDict({"late": late}), roles={"late.weight": "hidden"}):
        optimizer.add_param_group(group)
    weight = optimizer.param_groups[count]
    assert (weight["role"], weight["momentum"]) == ("hidden", 0.6)
    plain = [("plain", nn.Parameter(torch.ones(2)))]
    optimizer.add_param_group({"params": plain, "precondition": None})


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("momentun", "momentum"),
        ("weightdecay", "weight_decay"),
        ("LR", "lr"),
        ("wd", "weight_decay"),
        ("learning_rate", "lr"),
        ("precond", "precondition"),
        ("betas", "momentum"),
        ("layer", None),
    ],
)
def test_a_misspelled_option(key, near):
    group = {"params": vectors(1), key: 0.5}
    if near is None:  # not close to an option, so it may be the user's own
        assert Neumann([group], lr=0.1, precondition="spectral").param_groups[0][key] == 0.5
        return
    with pytest.raises(ValueError, match=f"'{key}' in a parameter group: did you mean '{near}'"):
        Neumann([group], lr=0.1, precondition="spectral")


def test_the_phase_before_the_first_step():
    spectral = Neumann(vectors(), 0.1, precondition="spectral")
    assert "step=0, phase='reset', t=0" in repr(spectral)
    assert spectral.diagnostics().phase == "reset"
    assert "step=0, phase='warm-up'" in repr(Neumann(vectors(), 0.1, warmup_steps=2, reset_steps=0))
