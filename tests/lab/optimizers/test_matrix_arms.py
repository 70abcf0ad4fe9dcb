"""Muon on text, NorMuon and SOAP: who gets which optimizer, rate and decay, and what is refused."""

import re
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from neumann.lab.errors import UsageError
from neumann.lab.models.gpt import ModernGPT, Size
from neumann.lab.optimizers.arms import Arm, build_optimizer
from neumann.lab.optimizers.role_rates import collect_roles
from tests.support.torch_versions import needs_muon

TEXT, IMAGES = "text:pages.txt", "cifar10"
NAMES = [pytest.param("muon", marks=needs_muon), "normuon", "soap"]


def make_model():
    torch.manual_seed(0)
    return ModernGPT(32, 8, Size(16, 1, 2))


def build(text, model=None, data=TEXT, **options):
    arm = Arm.parse(text).on(data)
    return build_optimizer(arm, model or make_model(), steps_per_epoch=1, **options)


def find_option(optimizer, model, key):
    """An option of each role's groups."""
    of = {p: group.get(key) for group in optimizer.param_groups for p in group["params"]}
    roles = collect_roles(model).items()
    return {role: {of[p] for p in parameters} for role, parameters in roles if parameters}


@pytest.mark.parametrize("name", NAMES)
def test_roles_have_their_rates_and_decay(name):
    model = make_model()
    optimizer = build(f"{name}:lr=0.5,embedding=2,output=4", model, weight_decay=0.25)
    assert find_option(optimizer, model, "lr") == {
        "hidden": {0.5},
        "embedding": {1.0},
        "output": {2.0},
    }
    decays = {"hidden": {0.25}, "embedding": {0.0}, "output": {0.25}}
    assert find_option(optimizer, model, "weight_decay") == decays
    betas = build(f"{name}:rest_betas=(0.8,0.9),rest_lr=0.1,output=2", model)
    assert find_option(betas, model, "betas")["embedding"] == {(0.8, 0.9)}
    rates = find_option(betas, model, "lr")
    assert (rates["embedding"], rates["output"]) == ({0.1}, {0.2})


@pytest.mark.parametrize("name", NAMES)
def test_only_hidden_matrices_are_preconditioned(name):
    model = make_model()
    optimizer = build(name, model)
    tokens = torch.randint(32, (4, 9))
    for _ in range(2):  # SOAP only looks at the first gradient
        optimizer.zero_grad()
        cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    own = {"muon": "momentum_buffer", "normuon": "second_momentum_buffer", "soap": "GG"}[name]
    for role, parameters in collect_roles(model).items():
        assert all((own in optimizer.state[p]) == (role == "hidden") for p in parameters)


@needs_muon
def test_muon_is_torchs_on_text_and_timms_elsewhere():
    assert type(build("muon").parts[0]) is torch.optim.Muon
    assert type(build("muon", data=IMAGES)).__module__.startswith("timm")
    assert type(build_optimizer(Arm.parse("muon"), make_model(), steps_per_epoch=1)) is type(
        build("muon", data=IMAGES)
    )
    with pytest.raises(UsageError, match="unknown muon option 'fallback_lr_scale'"):
        build("muon:fallback_lr_scale=2")
    with pytest.raises(UsageError, match="unknown muon option 'rest_lr'"):
        build("muon:rest_lr=2", data=IMAGES)
    for text in ("muon:fallback_lr_scale=2", "muon:rest_lr=2"):  # the data is not known yet
        Arm.parse(text).check()
    with pytest.raises(UsageError, match="unknown muon option 'momentm'; did you mean momentum"):
        Arm.parse("muon:momentm=2").check()


@needs_muon
def test_muon_by_norm_slows_layers_with_many_inputs():
    model = make_model()
    optimizer = build("muon:lr=0.5,adjust_lr_fn=norm", model)
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates[model.layers[0].forward_in.weight] == 0.5
    assert rates[model.layers[0].forward_out.weight] == 0.25  # 16 outputs, 64 inputs


@needs_muon
def test_normuon_by_norm_takes_steps_as_long_as_those_of_muon_by_norm():
    """Its rows differ, and the norm of the step of each matrix is the same."""
    sizes = []
    for arm in (
        "muon:lr=0.1,momentum=0.5,adjust_lr_fn=norm",
        "normuon:lr=0.1,momentum=0.5,update_scale=norm",
    ):
        model = make_model()
        optimizer, hidden = build(arm, model), collect_roles(model)["hidden"]
        before = [p.detach().clone() for p in hidden]
        tokens = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(0))
        cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        steps = [p.detach() - old for p, old in zip(hidden, before, strict=True)]
        sizes.append(torch.stack([step.norm() for step in steps]))
    torch.testing.assert_close(*sizes, rtol=0.02, atol=0)


def test_torch_without_muon(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(UsageError, match=r"^torch \S+ has no Muon: it needs 2.9 or newer$"):
        Arm.parse("muon").on(TEXT).check()
    Arm.parse("muon").on(IMAGES).check()
    Arm.parse("muon:rest_lr=1").check()  # of a comparison, which checks again with its data


@pytest.mark.parametrize("name", ["normuon", "soap"])
def test_a_missing_package(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(UsageError, match=r'pip install "\.\[pytorch-optimizer\]"'):
        Arm.parse(name).check()


def test_a_package_that_is_there_but_cannot_be_imported(tmp_path, monkeypatch):
    (tmp_path / "pytorch_optimizer.py").write_text("import a_package_of_another_version")
    monkeypatch.delitem(sys.modules, "pytorch_optimizer", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    message = "which cannot be imported: No module named 'a_package_of_another_version'"
    with pytest.raises(UsageError, match=message):
        Arm.parse("soap").check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("output=0", "output must be a finite number above 0, got 0"),
        ("rest_lr=-1", "rest_lr must be a finite number above 0, got -1"),
        ("rest_betas=0.9", "rest_betas must be two numbers in [0, 1), as in rest_betas=(0.9,0.95)"),
        ("rest_betas=(0.9,1)", "rest_betas must be two numbers in [0, 1)"),
        ("before=0.5", "unknown {} option 'before'"),
        ("decay_norms=true", "unknown {} option 'decay_norms'"),
        ("params=1", "unknown {} option 'params'"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_mistakes_are_one_line(name, options, message):
    with pytest.raises(UsageError) as caught:
        build(f"{name}:{options}")
    assert message.format(name) in str(caught.value)
    assert "\n" not in str(caught.value)


@needs_muon
@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("muon:ns_steps=1000", "ns_steps must be an integer from 1 to 99, got 1000"),
        ("muon:ns_steps=0", "ns_steps must be an integer from 1 to 99, got 0"),
        ("normuon:ns_steps=2.5", "ns_steps must be an integer from 1 to 99, got 2.5"),
        ("muon:momentum=2", "momentum must be a number in [0, 1), got 2"),
        ("muon:eps=-1", "eps must be a finite number above 0, got -1"),
        ("muon:adjust_lr_fn=foo", "must be none or original or match_rms_adamw or norm, got 'foo'"),
        ("normuon:update_scale=foo", "must be preserve_norm or match_rms or norm, got 'foo'"),
    ],
)
def test_options_of_orthogonalization_are_checked_before_the_first_step(arm, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        build(arm)


def test_a_model_without_hidden_matrices():
    model = nn.Sequential(nn.Linear(4, 2))
    with pytest.raises(UsageError, match="soap: the model has no hidden matrices: choose"):
        build("soap", model)
