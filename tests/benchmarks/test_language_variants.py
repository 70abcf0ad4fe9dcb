"""The leads as variants: every one trains, and is the plain arm at the strength that is neutral."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks.language.language_arms import Setting, build_arm, find_lr_factor
from benchmarks.language.language_variants import (
    MUON,
    RECIPE,
    VARIANTS,
    build_variant,
    list_variants,
    make_variant,
)
from benchmarks.language.step_wrappers import decay_cautiously
from neumann.lab.models.gpt import ModernGPT, Size
from neumann.lab.optimizers.role_rates import collect_roles

needs_muon = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="torch has no Muon before 2.9"
)
ARMS = [RECIPE, pytest.param(MUON, marks=needs_muon)]
PAIRS = [
    pytest.param(arm, name, marks=needs_muon if arm == MUON else ())
    for arm in (RECIPE, MUON)
    for name in list_variants(arm)
]
STEPS = 8
# Leads that have no strength at which they change nothing.
CHANGED_ANYWAY = (
    "fixed norm",
    "cautious decay",
    "power cooldown, cautious",
    "rotated output",
    "rotated output, power cooldown",
    "whitened output",
    "polar output",
    "head by head",
    *(name for name in VARIANTS if ", slow" in name),
)


def make_base(arm):
    return Setting(arm, 0.02, decay=2.0, embedding=0.1, output=1.0, vector=0.05)


def train(setting, inspect=lambda model, optimizer: None):
    """The weights to evaluate after a few steps, and the losses on the way."""
    torch.manual_seed(0)
    model = ModernGPT(16, 8, Size(16, 1, 2))
    tokens = torch.randint(16, (STEPS, 4, 9))
    optimizer = build_variant(model, setting, STEPS)
    peaks = [group["lr"] for group in optimizer.param_groups]
    losses = []
    for step in range(STEPS):
        factor = find_lr_factor(step, STEPS)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
            if setting.cooling:
                group["momentum"] = setting.momentum * factor**setting.cooling
        optimizer.zero_grad()
        logits = model(tokens[step, :, :-1])
        loss = cross_entropy(logits.flatten(0, 1), tokens[step, :, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        inspect(model, optimizer)
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), losses


@pytest.fixture(scope="module")
def plain():
    arms = (RECIPE, MUON) if hasattr(torch.optim, "Muon") else (RECIPE,)
    return {arm: train(make_base(arm))[0] for arm in arms}


@pytest.mark.parametrize(("arm", "name"), PAIRS)
def test_every_variant_trains_and_differs_from_the_plain_arm(plain, arm, name):
    found = []
    for strength in VARIANTS[name].strengths:
        weights, losses = train(make_variant(make_base(arm), name, strength))
        assert all(map(math.isfinite, losses))
        assert weights.isfinite().all()
        found.append(weights)
    for weights in found:
        assert (weights - plain[arm]).norm() > 1e-4 * plain[arm].norm()
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(found))


# Where a lead changes nothing, if that is not at 0.
MATRICES = ("queries and keys", "values", "forward layers")
ONE = ("slower rest", "power cooldown", "late cooldown", *(n for n in VARIANTS if "control" in n))
NEUTRAL = {
    **dict.fromkeys(VARIANTS, 0.0),
    **dict.fromkeys([*ONE, *MATRICES], 1.0),
    **dict.fromkeys(["momentum of the output", "momentum of embeddings"], 0.6),  # μ of make_base
    "memory of the output": 0.99,  # of the usual diagonal P
}


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in CHANGED_ANYWAY])
def test_without_strength_it_is_the_recipe_bit_for_bit(plain, name):
    weights, _ = train(make_variant(make_base(RECIPE), name, NEUTRAL[name]))
    assert torch.equal(weights, plain[RECIPE])


@needs_muon
@pytest.mark.parametrize(
    "name",
    [name for name in list_variants(MUON) if name not in CHANGED_ANYWAY],
)
def test_without_strength_it_is_muon(plain, name):
    """Up to rounding: Muon's Newton-Schulz runs in bfloat16, and its momentum has another scale."""
    weights, _ = train(make_variant(make_base(MUON), name, NEUTRAL[name]))
    assert (weights - plain[MUON]).norm() < 0.01 * plain[MUON].norm()
    if not any(word in name for word in ("momentum", "whitening", "slow sum", "rows")):
        assert torch.equal(weights, plain[MUON])


def test_a_late_cooldown_stays_at_the_peak_and_ends_as_usual():
    base = make_variant(make_base(RECIPE), "late cooldown", 0.5)
    optimizer = build_variant(ModernGPT(16, 8, Size(16, 1, 2)), base, 100)
    rates = []
    for step in range(100):
        usual = find_lr_factor(step, 100)
        for group in optimizer.param_groups:
            group["lr"] = usual
        optimizer.prepare()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.done += 1
    assert rates[2:51] == pytest.approx([1.0] * 49)
    assert rates[75] == pytest.approx(2 * find_lr_factor(75, 100))


def test_head_by_head_splits_queries_and_keys():
    setting = make_variant(make_base(RECIPE), "head by head", 2.5)
    groups = build_variant(ModernGPT(16, 8, Size(16, 1, 2)), setting, STEPS).param_groups
    whole, split = (group for group in groups if group["role"] == "hidden")
    assert {name.split(".")[-2] for name in split["param_names"]} == {"query", "key"}
    assert not any("query" in name or "key" in name for name in whole["param_names"])
    assert split["precondition"].view.heads == 2
    assert split["precondition"].scale == 2.5 * whole["precondition"].scale


@pytest.mark.parametrize("arm", ARMS)
def test_cautious_decay_of_strength_0_is_no_decay(arm):
    base = make_base(arm)
    weights, _ = train(make_variant(base, "cautious decay", 0.0))
    without, _ = train(Setting(**{**vars(base), "decay": 0.0}))
    assert torch.equal(weights, without)


def test_cautious_decay_takes_from_elements_that_shrink():
    before = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0])
    after = torch.tensor([0.9, 1.1, -0.9, -1.1, 0.1])
    decay_cautiously(after, before, 0.5)
    assert after.tolist() == pytest.approx([0.4, 1.1, -0.4, -1.1, 0.1])


@pytest.mark.parametrize("arm", ARMS)
def test_hidden_matrices_keep_their_norm_where_it_is_evaluated(arm):
    torch.manual_seed(0)
    model = ModernGPT(16, 8, Size(16, 1, 2))
    initial = [p.norm().item() for p in collect_roles(model)["hidden"]]
    norms = []

    def measure(model, optimizer):
        inner = optimizer.inner
        if hasattr(inner, "eval"):
            inner.eval()
        norms.append([p.norm().item() for p in collect_roles(model)["hidden"]])
        if hasattr(inner, "train"):
            inner.train()

    train(make_variant(make_base(arm), "fixed norm", 1.0), measure)
    assert len(norms) == STEPS
    for found in norms:
        assert found == pytest.approx(initial, rel=1e-5)


def test_extrapolation_shifts_the_weights_only_inside_its_window():
    shifts = []

    def measure(model, optimizer):
        own = torch.cat([p.flatten() for p in optimizer._own])
        shown = torch.cat([p.detach().flatten() for p in optimizer.parameters])
        shifts.append((own - shown).norm().item())

    train(make_variant(make_base(RECIPE), "extrapolation 0.9", 0.6), measure)
    # After 1 to 8 of 8 steps; the reset of the first step moves no weight.
    assert [shift > 0 for shift in shifts] == [False, True, True, True, True, True, False, False]


def test_cooldowns_have_their_rates():
    rates = []

    def measure(model, optimizer):
        roles = collect_roles(model)
        group = {p: g["lr"] for g in optimizer.param_groups for p in g["params"]}
        rates.append((group[roles["hidden"][0]], group[roles["embedding"][0]]))

    train(make_variant(make_base(RECIPE), "slower rest", 0.5), measure)
    factors = [find_lr_factor(step, STEPS) for step in range(STEPS)]
    assert [rate for rate, _ in rates] == pytest.approx([0.02 * f for f in factors])
    assert [rate for _, rate in rates] == pytest.approx([0.02 * f**0.5 for f in factors])


def test_the_control_of_the_rate_keeps_lr_times_decay():
    products = []

    def measure(model, optimizer):
        hidden = collect_roles(model)["hidden"][0]
        (group,) = (g for g in optimizer.param_groups if any(p is hidden for p in g["params"]))
        products.append((group["lr"], group["lr"] * group["weight_decay"]))

    train(make_variant(make_base(RECIPE), "control: hidden rate", 1.4), measure)
    factors = [find_lr_factor(step, STEPS) for step in range(STEPS)]
    assert [lr for lr, _ in products] == pytest.approx([0.028 * f for f in factors])
    assert [product for _, product in products] == pytest.approx([0.04 * f for f in factors])


def test_an_unknown_lead_is_refused():
    model = ModernGPT(16, 8, Size(16, 1, 2))
    for setting in (
        make_variant(make_base(RECIPE), "magic", 1.0),
        make_variant(make_base(MUON), "even rows", 1.0),
    ):
        with pytest.raises(ValueError, match="does not exist for the arm"):
            build_variant(model, setting, STEPS)
    assert type(build_variant(model, make_base(RECIPE), STEPS)) is type(
        build_arm(model, make_base(RECIPE), STEPS)
    )
