"""Preconditioned steps: P is correct, is applied at the right place, and passes the same tests as
the plain form."""

import copy

import pytest
import torch
from torch import nn

from neumann import Neumann
from neumann.optim.preconditioners import Diagonal, Momentum, Preconditioner, Spectral, apply
from neumann.optim.preconditioners.memory import preconditioner_of
from tests.support.preconditioned import (
    CLOCK,
    FORMS,
    Signs,
    gradients,
    memory,
    network,
    trained,
    weights,
)


def test_the_diagonal_equals_adam_without_momentum():
    ours, _ = trained(precondition=Diagonal(0.9, 1e-6, scale=1.0), warmup_steps=100)
    theirs = network()
    adam = torch.optim.Adam(theirs.parameters(), lr=0.01, betas=(0.0, 0.9), eps=1e-6)
    trained(model=theirs, optimizer=adam)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-5, atol=1e-7)


def test_momentum_is_nesterovs():
    momentum, g = Momentum(0.5), torch.tensor([1.0, -2.0])
    states = [momentum.create(g)]
    found = [momentum.apply([k * g], states)[0] for k in (1, 0, 4)]
    for direction, factor in zip(found, (1.5, 0.25, 6.125), strict=True):  # b = 1, 0.5, 4.25 g
        torch.testing.assert_close(direction, factor * g)


def test_a_preconditioner_sees_what_the_one_before_it_gives():
    """In the warm-up w ← w − ηP(g): P is orthogonalized momentum, and both have a state."""
    ours, optimizer = trained(5, warmup_steps=100, precondition="spectral")
    theirs = network()
    stages = [Momentum(), Spectral(before=None)]
    states = [{**stages[0].create(p), **stages[1].create(p)} for p in theirs.parameters()]
    for step in range(5):
        gradients(theirs, step)
        directions = [p.grad for p in theirs.parameters()]
        for stage in stages:
            directions = stage.apply(directions, states)
        for p, direction in zip(theirs.parameters(), directions, strict=True):
            p.data.sub_(direction, alpha=0.01)
    torch.testing.assert_close(weights(ours), weights(theirs))
    assert all("preconditioner_past" in state for state in optimizer.state.values())


def test_only_the_learning_rate_is_required():
    """Under P the series stands by itself; what is given wins, and None keeps the paper's."""
    usual = {"warmup_steps": 0, "reset_steps": 0, "cubic": 0.0, "repulsive": 0.0}
    usual["decoupled_weight_decay"] = True
    momenta = {"diagonal": 0.9, "spectral": 0.6, Spectral(scale=1.0): 0.6, Signs(): 0.9}
    for precondition, momentum in momenta.items():
        (group,) = Neumann(network().parameters(), 0.01, precondition=precondition).param_groups
        assert {name: group[name] for name in usual} == usual
        assert group["momentum"] == momentum
    given = {"momentum": 0.3, "cubic": 1e-3, "repulsive": 1e-2, "decoupled_weight_decay": False}
    epochs = {"steps_per_epoch": 5, "warmup_epochs": 2, "reset_epochs": 4}
    (group,) = Neumann(
        network().parameters(), 0.01, precondition="spectral", **given, **epochs
    ).param_groups
    expected = {**given, "warmup_steps": 10, "reset_steps": 20}
    assert {name: group[name] for name in expected} == expected
    (group,) = Neumann(network().parameters(), 0.01, steps_per_epoch=5).param_groups
    expected = {"warmup_steps": 25, "reset_steps": 50, "momentum": 0.9, "cubic": 1e-7}
    expected |= {"repulsive": 1e-5, "decoupled_weight_decay": False}
    assert {name: group[name] for name in expected} == expected


@pytest.mark.parametrize("name", ["diagonal", "spectral"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_all_forms_agree(name, form):
    common = {"precondition": name, "weight_decay": 0.1}
    reference, _ = trained(foreach=False, **common)
    torch.testing.assert_close(weights(trained(**form, **common)[0]), weights(reference))


@pytest.mark.parametrize("name", ["diagonal", "spectral"])
def test_l2_decay_goes_through_the_preconditioner_and_decoupled_does_not(name):
    """After one step of the warm-up: w − ηP(g + λw), or w − ηP(g) − ηλw."""
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    preconditioner = {"diagonal": Diagonal(), "spectral": Spectral()}[name]
    gradients(model, 0)
    raw = [p.grad.clone() for p in model.parameters()]
    for decoupled in (False, True):
        here = copy.deepcopy(model)
        options = {"weight_decay": 0.3, "decoupled_weight_decay": decoupled, "maximize": True}
        trained(1, here, precondition=name, **options)
        given = [-g if decoupled else -g + 0.3 * w for g, w in zip(raw, before, strict=True)]
        found = preconditioner.apply(given, [preconditioner.create(p) for p in before])
        for p, w, direction in zip(here.parameters(), before, found, strict=True):
            expected = w - 0.01 * direction - (0.003 * w if decoupled else 0)
            torch.testing.assert_close(p.detach(), expected)


def test_gradients_are_never_changed():
    model, optimizer = trained(3, precondition="spectral", weight_decay=0.1)
    gradients(model, 7)
    before = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_a_custom_preconditioner():
    assert isinstance(Signs(), Preconditioner)
    model, optimizer = trained(3, precondition=Signs())
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"][0]["precondition"] == "signs"
    again = network(seed=1)
    again.load_state_dict(model.state_dict())
    resumed = Neumann(again.named_parameters(), lr=0.01, precondition=Signs(), **CLOCK)
    resumed.load_state_dict(saved)
    trained(4, again, resumed, first=3)
    trained(4, model, optimizer, first=3)
    assert torch.equal(weights(again), weights(model))
    stranger = Neumann(network().named_parameters(), lr=0.01, **CLOCK)
    with pytest.raises(ValueError, match="saved with the preconditioner 'signs'"):
        stranger.load_state_dict(saved)


def test_groups_may_differ():
    model = network()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "precondition": "spectral"}, {"params": rest}]
    optimizer = Neumann(groups, lr=0.01, cubic=0, repulsive=0, **CLOCK)
    trained(3, model, optimizer)
    assert optimizer.param_groups[1]["precondition"] is None
    assert not any(key.startswith("precond") for p in rest for key in optimizer.state[p])


@pytest.mark.parametrize("name", ["diagonal", "spectral"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(name, dtype):
    model, optimizer = trained(model=network(dtype=dtype), precondition=name)
    assert torch.isfinite(weights(model)).all()
    moments = [s.get("preconditioner_second_moment") for s in optimizer.state.values()]
    assert all(m is None or m.dtype == torch.promote_types(dtype, torch.float32) for m in moments)
    reference, _ = trained(precondition=name)
    near = 0.05 if dtype is torch.bfloat16 else 1e-4
    assert (weights(model).float() - weights(reference)).abs().max() < near


def test_bfloat16_state():
    model, _ = trained(precondition="spectral", state_dtype=torch.bfloat16)
    reference, _ = trained(precondition="spectral")
    assert (weights(model) - weights(reference)).abs().max() < 0.01


def test_complex_parameters():
    p = nn.Parameter(torch.ones(3, 4, dtype=torch.complex64))
    optimizer = Neumann([p], lr=0.1, precondition="spectral", **CLOCK)
    for _ in range(6):
        p.grad = torch.full_like(p, 2 + 1j)
        optimizer.step()
    assert torch.isfinite(torch.view_as_real(p.detach())).all()


def test_evaluation_weights():
    model, optimizer = trained(precondition="spectral")
    training = weights(model).clone()
    with optimizer.evaluating():
        assert not torch.equal(weights(model), training)
    assert torch.equal(weights(model), training)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("spectrall", "precondition must be None, one of 'diagonal', 'spectral' or a Precond"),
        (Diagonal, "precondition must be None"),
        (3, "precondition must be None"),
    ],
)
def test_refused(value, message):
    with pytest.raises(ValueError, match=message):
        Neumann(network().parameters(), lr=0.1, precondition=value, **CLOCK)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diagonal", "spectral"])
def test_a_compiled_step(name):
    model = network()
    optimizer = Neumann(model.named_parameters(), lr=0.01, precondition=name, **CLOCK)
    step = torch.compile(lambda: optimizer.step(), fullgraph=True, backend="aot_eager")
    for number in range(12):
        gradients(model, number)
        step()
    torch.testing.assert_close(weights(model), weights(trained(precondition=name)[0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diagonal", "spectral"])
def test_a_skipped_step_leaves_its_memory_alone(name):
    """On the host, where the step ends before P, and compiled, where it is put back."""
    for compiled in (False, True):
        model = network()
        options = {"precondition": name, "skip_nonfinite": True, "warmup_steps": 9}
        optimizer = Neumann(model.named_parameters(), lr=0.01, **options)
        step = optimizer.step
        if compiled:
            step = torch.compile(lambda o=optimizer: o.step(), fullgraph=True, backend="eager")
        for number in range(4):
            gradients(model, number)
            before = copy.deepcopy(memory(optimizer)), weights(model).clone()
            if number == 3:
                next(model.parameters()).grad.fill_(torch.inf)
            step()
            same = all(map(torch.equal, before[0], memory(optimizer)))
            assert same == torch.equal(before[1], weights(model)) == (number == 3)


def test_a_loss_scale_is_divided_out_of_every_group():
    """Also of 16-bit gradients without P, in whose dtype the scale is infinite."""

    def run(scale):
        half = nn.Parameter(torch.ones(3, dtype=torch.float16))
        plain, summed, turned = (nn.Parameter(torch.ones(4, 3)) for _ in range(3))
        groups = [
            {"params": [half, plain], "precondition": None},
            {"params": [summed], "precondition": Momentum()},  # whose directions have a size
            {"params": [turned]},
        ]
        options = {"warmup_steps": 9, "momentum": 0.5, "fused": True}
        optimizer = Neumann(groups, lr=0.125, precondition="spectral", **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = half.float().sum() / 4 + sum(p.square().sum() for p in (plain, summed, turned))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [p.detach().float() for p in (half, plain, summed, turned)]

    for ours, theirs in zip(run(2.0**16), run(1.0), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert not torch.equal(ours, torch.ones_like(ours))


def test_matrices_go_first(monkeypatch):
    """A GPU is busy with them while the host launches the rest; the groups keep their order."""
    applied = []

    def watch(group, *given):
        applied.append(preconditioner_of(group.options))
        return apply_to(group, *given)

    apply_to = apply.precondition_group
    monkeypatch.setattr(apply, "precondition_group", watch)
    groups = [
        {"params": [nn.Parameter(torch.full((3, 3), float(n)))], "precondition": p}
        for n, p in enumerate(["diagonal", None, "spectral", "diagonal"])
    ]
    optimizer = Neumann(groups, lr=0.1, precondition="spectral", warmup_steps=1)
    for group in groups:
        group["params"][0].grad = torch.eye(3)
    found, _ = apply.precondition(optimizer._gather(), None, None)
    assert [p and p.name for p in applied] == ["spectral", "diagonal", None, "diagonal"]
    assert [group.weights[0].detach()[0, 0].item() for group in found] == [0, 1, 2, 3]


def test_repr_shows_the_preconditioner():
    groups = [{"params": [nn.Parameter(torch.ones(2))], "precondition": p} for p in (None, Signs())]
    shown = repr(Neumann(groups, lr=0.1, cubic=0, repulsive=0, **CLOCK))
    assert "precondition=None" in shown
    assert "precondition=Signs()" in shown
