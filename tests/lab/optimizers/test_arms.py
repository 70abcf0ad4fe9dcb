"""Arms: they build the optimizer that they name, and mistakes are refused in one line."""

import contextlib
import re
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from neumann import Neumann
from neumann.lab.errors import UsageError
from neumann.lab.optimizers.arm_recipes import RECIPES
from neumann.lab.optimizers.arms import Arm, build_optimizer, check_arm, evaluation_mode
from neumann.lab.training.gradients import GradientComputer
from neumann.lab.training.inner_loops import InnerLoop
from neumann.optim.preconditioners import SlowMomentum
from neumann.optim.recipe import LR
from tests.support.torch_versions import needs_muon


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))


@pytest.mark.parametrize("name", RECIPES)
def test_every_optimizer_takes_a_step_that_helps(name):
    net = model()
    optimizer = build_optimizer(Arm.parse(name), net, steps_per_epoch=2)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] > 0).long()
    if hasattr(optimizer, "train"):
        optimizer.train()
    computer = GradientComputer(net, optimizer, cross_entropy, contextlib.nullcontext, False)
    loop = InnerLoop(optimizer, computer, net, cross_entropy, contextlib.nullcontext)
    assert loop.suits(optimizer) == RECIPES[name].inner_loop
    losses = []
    for _ in range(40):
        if RECIPES[name].inner_loop:
            losses.append(loop.take_step([(x, y)]).item())
        else:
            losses.append(computer.compute([(x, y)]).item())
            optimizer.step()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", RECIPES)
def test_every_optimizer_passes_the_check(name):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    check_arm(Arm.parse(name).on("digits"))
    assert torch.equal(torch.get_rng_state(), before)


@needs_muon
def test_the_muon_of_text_passes_the_check():
    check_arm(Arm.parse("muon").on("text:a.txt"))


@pytest.mark.parametrize("wrong", ["3", "()", "(0.9,)", "(0.9,1)", "(0.9,x)", "(0.9,0.9,0.9)"])
def test_momenta_must_be_as_many_numbers_as_usual(wrong):
    message = "betas must be two numbers in [0, 1), as in betas=(0.9,0.999), got "
    with pytest.raises(UsageError, match=re.escape(message)):
        check_arm(Arm.parse(f"adamw:betas={wrong}"))


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("sgd", {}),
        ("sgd:lr=0.4", {"lr": 0.4}),
        ("adamw:betas=(0.9,0.95),lr=2e-3", {"betas": (0.9, 0.95), "lr": 2e-3}),
        (
            "neumann:bounded=false,variables=elements,state_dtype=none",
            {"bounded": False, "variables": "elements", "state_dtype": None},
        ),
    ],
)
def test_an_arm_is_parsed_and_formatted(text, options):
    arm = Arm.parse(text)
    assert dict(arm.options) == options
    assert Arm.parse(str(arm)) == arm


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("neuman", "'neuman'; did you mean neumann, neumann-spectral or neumann-diagonal?"),
        ("zzz", "unknown optimizer 'zzz'; choose from: neumann-spectral, neumann,"),
        ("sgd:lr", "'lr' should be key=value"),
        ("sgd:lr=1,lr=2", "names lr twice"),
        ("sgd:momentm=0.9", "unknown sgd option 'momentm'; did you mean momentum"),
        ("sgd:params=1", "unknown sgd option 'params'"),
        ("neumann:momentum=2", "momentum must be in"),
        ("adam:lr=-1", "Invalid learning rate"),
        ("sgd:lr=1e400", "lr must be finite, got 1e400"),
        ("sgd:lr=nan", "lr must be finite, got nan"),
        ("sgd:momentum=nan", "momentum must be finite, got nan"),
        ("sgd:weight_decay=-1", "weight_decay must be at least 0, got -1"),
        ("sgd:nesterov=maybe", "nesterov must be true or false, got maybe"),
        ("adamw:decay_norms=1", "decay_norms must be true or false, got 1"),
        ("neumann:precondition=nowhere:P", "precondition: there is no module nowhere"),
        ("neumann:precondition=math:P", "unknown function of math 'P'"),
        ("neumann:precondition=math:sqrt", "precondition math:sqrt: TypeError"),
        ("neumann:precondition=builtins:dict", "precondition must be"),
        ("neumann-spectral:precondition=diagonal", "unknown neumann-spectral option"),
        ("neumann-diagonal:precondition=spectral", "unknown neumann-diagonal option"),
        ("idealized:outer_lr=1", "unknown idealized option 'outer_lr'"),
        ("idealized:inner_steps=-1", "inner_steps must be an integer of at least 0, got -1"),
        ("idealized:inner_lr=abc", "inner_lr must be finite and at least 0, got 'abc'"),
        ("idealized:momentum=2", "momentum must be in (0, 1], got 2"),
        ("cg:curvature=fisher", "curvature must be one of hessian, gauss-newton, got 'fisher'"),
        ("cg:damping=-1", "damping must be finite and at least 0, got -1"),
        ("cg:max_products=0", "max_products must be an integer of at least 1, got 0"),
        ("cg:decay_norms=false", "unknown cg option 'decay_norms'"),
    ],
)
def test_bad_arms_are_refused_in_one_line(text, message):
    with pytest.raises(UsageError) as caught:
        build_optimizer(Arm.parse(text), model(), steps_per_epoch=1)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("word", "value"), [("off", False), ("no", False), ("yes", True)])
def test_words_for_yes_and_no(word, value):
    """A word that stays text would be true for torch's optimizers, whatever it says."""
    optimizer = build_optimizer(Arm.parse(f"sgd:nesterov={word}"), model(), steps_per_epoch=1)
    assert optimizer.param_groups[0]["nesterov"] is value


def test_every_option_of_neumann_is_reachable():
    text = "neumann:lr=0.3,warmup_steps=3,reset_steps=0,cubic=0.0,repulsive=0.0,foreach=true"
    optimizer = build_optimizer(Arm.parse(text), model(), steps_per_epoch=7)
    assert isinstance(optimizer, Neumann)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["warmup_steps"], group["cubic"]) == (0.3, 3, 0.0)
    assert group["foreach"] is True


def test_a_preconditioner_written_by_the_user(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    body = "from neumann.optim.preconditioners import Diagonal\n\ndef slow():\n    "
    (tmp_path / "mine_for_the_lab.py").write_text(body + "return Diagonal(decay=0.5)\n")
    arm = Arm.parse("neumann:precondition=mine_for_the_lab:slow")
    optimizer = build_optimizer(arm, model(), steps_per_epoch=7)
    assert optimizer.param_groups[0]["precondition"].decay == 0.5


PRECONDITIONED = [
    "",
    ":precondition=none",
    ":precondition=diagonal",
    ":precondition=spectral",
    ":precondition=mine:P",
]


def test_epochs_become_steps():
    optimizer = build_optimizer(Arm.parse("neumann"), model(), steps_per_epoch=7)
    assert optimizer.param_groups[0]["warmup_steps"] == 35


def test_the_lr_of_the_arm_wins_then_the_commands_then_the_recipes():
    assert Arm.parse("sgd:lr=3").lr(2.0) == 3
    assert Arm.parse("sgd").lr(2.0) == 2
    assert Arm.parse("sgd").lr() == RECIPES["sgd"].lr
    usual = [Arm.parse(f"neumann{p}").lr() for p in PRECONDITIONED]
    assert usual == [0.2, 0.2, 0.0025, 0.015, 0.015]


def test_weight_decay_spares_biases_and_norms_if_the_recipe_says_so():
    def decays(text):
        optimizer = build_optimizer(Arm.parse(text), model(), weight_decay=0.1, steps_per_epoch=1)
        return {p.ndim: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}

    assert decays("adamw") == {2: 0.1, 1: 0.0}
    assert decays("sgd") == {2: 0.1, 1: 0.1}
    assert decays("sgd:decay_norms=false") == {2: 0.1, 1: 0.0}
    assert decays("neumann") == decays("neumann:precondition=none") == {2: 0.1, 1: 0.1}
    assert decays("neumann:precondition=spectral") == {2: 0.1, 1: 0.0}
    assert decays("adamw:decay_norms=true,weight_decay=0.3") == {2: 0.3, 1: 0.3}
    assert decays("neumann-spectral") == {2: 0.1, 1: 0.0}
    assert decays("neumann-spectral:decay_norms=true") == {2: 0.1, 1: 0.1}


def test_a_frozen_model_is_refused():
    net = model().requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter that requires gradients"):
        build_optimizer(Arm.parse("sgd"), net, steps_per_epoch=1)


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm.optim", None)
    with pytest.raises(UsageError, match=r'needs timm.*pip install "\.\[timm\]"'):
        build_optimizer(Arm.parse("lamb"), model(), steps_per_epoch=1)


@pytest.mark.parametrize("name", ["neumann:warmup_steps=0", "schedulefree", "sgd"])
def test_evaluation_mode_switches_to_the_evaluation_weights(name):
    net = model()
    optimizer = build_optimizer(Arm.parse(name), net, steps_per_epoch=1)
    if hasattr(optimizer, "train"):
        optimizer.train()
    for _ in range(5):
        optimizer.zero_grad()
        net(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    before = [p.detach().clone() for p in net.parameters()]
    with evaluation_mode(optimizer):
        inside = [p.detach().clone() for p in net.parameters()]
    after = list(net.parameters())
    assert all(torch.allclose(a, b) for a, b in zip(before, after, strict=True))
    switched = not all(torch.equal(a, b) for a, b in zip(before, inside, strict=True))
    assert switched == (name != "sgd")


def test_decay_that_follows_from_the_length_of_a_run():
    arm = Arm.parse("neumann-spectral:lr=0.05,weight_decay=auto")
    optimizer = build_optimizer(arm, model(), steps_per_epoch=10, steps=200)
    decays = {group["role"]: group["weight_decay"] for group in optimizer.param_groups}
    assert decays["hidden"] * 0.05 * 200 in (pytest.approx(2.5), pytest.approx(10.0))
    for name in ("adamw", "neumann"):
        with pytest.raises(UsageError, match="weight_decay must be a number, got auto"):
            build_optimizer(
                Arm.parse(f"{name}:weight_decay=auto"), model(), steps_per_epoch=10, steps=100
            )


def test_forms_by_name():
    """Each form is an arm of its own; the spectral one treats each parameter by its role."""
    spectral = build_optimizer(
        Arm.parse("neumann-spectral"), model(), steps_per_epoch=2, weight_decay=0.25
    )
    decays = {group["role"]: group["weight_decay"] for group in spectral.param_groups}
    assert decays == {"hidden": 0.25, "output": 0.25, "vector": 0.0}
    assert {group["lr"] for group in spectral.param_groups} == {LR}
    for name in ("neumann-diagonal", "neumann:precondition=diagonal"):
        diagonal = build_optimizer(Arm.parse(name), model(), steps_per_epoch=2)
        assert {group["precondition"] for group in diagonal.param_groups} == {"diagonal"}
        assert {group["lr"] for group in diagonal.param_groups} == {2.5e-3}
    assert Arm.parse("neumann:precondition=spectral").lr() == 0.015


def test_options_of_roles():
    arm = Arm.parse("neumann-spectral:output=2,vector=0.5,before=0.3,momentum=0.7")
    changed = build_optimizer(arm, model(), steps_per_epoch=2)
    usual = build_optimizer(Arm.parse("neumann-spectral"), model(), steps_per_epoch=2)
    for before, after in zip(usual.param_groups, changed.param_groups, strict=True):
        factor = {"hidden": 1, "output": 2, "vector": 0.5}[before["role"]]
        assert after["role"] == before["role"]
        assert after["precondition"].scale == factor * before["precondition"].scale
        assert after["precondition"].before.decay == 0.3
        assert after["momentum"] == 0.7
    for text, message in (
        ("neumann-spectral:output=big", "output must be a finite number above 0, got 'big'"),
        ("neumann-spectral:output=0", "output must be a finite number above 0, got 0"),
        ("neumann-spectral:output=true", "output must be a finite number above 0, got True"),
        ("neumann-spectral:before=2", r"before must be in \[0, 1\), got 2"),
        ("neumann-spectral:slow_momentum=2", "slow_momentum must be a share, from 0 to 1, got 2"),
        ("sgd:output=2", "unknown sgd option 'output'"),
    ):
        with pytest.raises(UsageError, match=message):
            build_optimizer(Arm.parse(text), model(), steps_per_epoch=2, steps=10)


def test_slow_momentum_depends_on_the_length_of_a_run():
    arm = Arm.parse("neumann-spectral:slow_momentum=0.6,before=0.7")
    optimizer = build_optimizer(arm, model(), steps_per_epoch=2, steps=200)
    (hidden,) = (g for g in optimizer.param_groups if g["role"] == "hidden")
    assert hidden["precondition"].before == SlowMomentum(0.7, 0.98, 0.6, 60)
    with pytest.raises(UsageError, match="steps must be known for slow_momentum"):
        build_optimizer(arm, model(), steps_per_epoch=2)


@pytest.mark.parametrize(
    "start",
    ["adamw:", "schedulefree:", "neumann:", "neumann-diagonal:", "neumann:precondition=spectral,"],
)
def test_a_rate_for_each_role(start):
    """Naming one groups by role, and weight decay acts on hidden matrices and the output layer."""
    arm = Arm.parse(f"{start}lr=0.5,rest_lr=0.25,output=4,vector=2")
    optimizer = build_optimizer(arm, model(), steps_per_epoch=1, weight_decay=0.25)
    found = {g["role"]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups}
    assert found == {"hidden": (0.5, 0.25), "output": (1.0, 0.25), "vector": (0.5, 0.0)}
    plain = build_optimizer(Arm.parse(f"{start}lr=0.5"), model(), steps_per_epoch=1)
    assert all("role" not in group for group in plain.param_groups)
    for wrong, message in (
        ("output=0", "output must be a finite number above 0, got 0"),
        ("output=2,decay_norms=true", "decay_norms and output cannot be combined"),
    ):
        arm = Arm.parse(start + wrong)
        with pytest.raises(UsageError, match=message):
            build_optimizer(arm, model(), steps_per_epoch=1)
