"""Preconditioned steps: P is what it says, stands where it should, and survives whatever the plain
form survives."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from neumann import Neumann
from neumann.optim import spectral
from neumann.optim.preconditioners import Diagonal, Momentum, Preconditioner
from neumann.optim.spectral import Spectral, orthogonalised

FORMS = [{"foreach": False}, {"foreach": True}, {"fused": True}]
CLOCK = {"warmup_steps": 2, "reset_steps": 4}


def network(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 5)
    ).to(dtype)


def gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p.dtype)


def trained(steps=12, model=None, optimizer=None, first=0, **options):
    model = model or network()
    optimizer = optimizer or Neumann(model.named_parameters(), lr=0.01, **{**CLOCK, **options})
    for step in range(first, first + steps):
        gradients(model, step)
        optimizer.step()
    return model, optimizer


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_diagonal_is_adams_without_momentum():
    ours, _ = trained(precondition=Diagonal(decay=0.9, eps=1e-6), warmup_steps=100)
    theirs = network()
    adam = torch.optim.Adam(theirs.parameters(), lr=0.01, betas=(0.0, 0.9), eps=1e-6)
    trained(model=theirs, optimizer=adam)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 8, 21), (1, 7, 7)])
def test_orthogonalised_matrices_have_the_gradients_singular_vectors(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(matrices, full_matrices=False)
    found = u.mT @ orthogonalised(matrices) @ v.mT  # diagonal, with the new singular values
    values = torch.diagonal(found, dim1=1, dim2=2)
    assert (found - torch.diag_embed(values)).abs().max() < 1e-4
    large = s > 0.05 * s[:, :1]
    assert values[large].min() > 0.6
    assert values.max() < 1.3


@pytest.mark.parametrize("size", [1e-36, 1e-20, 1e20, 3e38])
def test_the_gradients_size_does_not_matter(size):
    """Where squares underflow and overflow, too; what is next to nothing fades away."""
    matrix = torch.tensor([[[0.3, -0.9, 0.1], [1.0, 0.2, -0.4]]])
    torch.testing.assert_close(orthogonalised(matrix * size), orthogonalised(matrix))
    assert orthogonalised(matrix * 1e-42).abs().max() < 0.1


def test_nothing_stays_nothing():
    assert not orthogonalised(torch.zeros(2, 3, 4)).any()


def test_matrices_are_taken_together_or_alone_to_the_same_end(monkeypatch):
    """Tall, lying, padded with columns of zeros as on a GPU: each as if there were no other."""
    shapes = [(8, 20), (20, 8), (8, 12), (12, 8), (8, 3, 2, 2), (8, 8), (9, 20), (5, 5)]
    gradients = [torch.randn(shape) for shape in shapes]
    alone = [Spectral().apply([g], [{}])[0] for g in gradients]
    sizes = []
    for launching in (0.0, 1e5, 1e9):
        monkeypatch.setattr(spectral, "_launching", lambda matrix, value=launching: value)
        lying = {i: g.flatten(1) if len(g) < 10 else g.mT for i, g in enumerate(gradients)}
        sizes.append(sorted(map(len, spectral._batches(lying))))
        together = Spectral().apply(gradients, [{} for _ in gradients])
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert sizes == [[1, 1, 1, 2, 3], [1, 1, 6], [1, 1, 6]]


def test_gradients_may_lie_in_memory_as_they_like():
    plain = torch.randn(4, 6, 3, 3)
    odd = torch.randn(3, 3, 6, 4).permute(3, 2, 0, 1).copy_(plain)
    (ours,), (theirs,) = (Spectral().apply([g], [{}]) for g in (odd, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_every_direction_has_the_same_root_mean_square():
    half = Spectral(scale=0.5, vectors=Diagonal(scale=0.5))
    tensors = [torch.randn(shape) for shape in [(64, 3, 3, 3), (128, 256), (10, 512), (90,)]]
    found = half.apply(tensors, [half.create(t) for t in tensors])
    for direction in found:  # singular values end up between 0.7 and 1.2
        assert direction.square().mean().sqrt().item() == pytest.approx(0.5, rel=0.25)


def test_the_memory_format_does_not_matter():
    plain = torch.randn(6, 4, 3, 3)
    last = plain.to(memory_format=torch.channels_last)
    (ours,), (theirs,) = (Spectral().apply([g], [{}]) for g in (last, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert ours.stride() == last.stride()


def test_momentum_is_nesterovs():
    momentum, g = Momentum(0.5), torch.tensor([1.0, -2.0])
    states = [momentum.create(g)]
    found = [momentum.apply([k * g], states)[0] for k in (1, 0, 4)]
    for direction, factor in zip(found, (1.5, 0.25, 6.125), strict=True):  # b = 1, 0.5, 4.25 g
        torch.testing.assert_close(direction, factor * g)


def test_a_preconditioner_sees_what_the_one_before_it_gives():
    """In the warm-up w ← w − ηP(g): P is orthogonalised momentum, and both have a state."""
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


def test_the_learning_rate_is_all_that_must_be_given():
    """Under P the series stands by itself; what is given wins, and None keeps the paper's."""
    usual = {"warmup_steps": 0, "reset_steps": 0, "momentum": 0.6, "cubic": 0.0, "repulsive": 0.0}
    usual["decoupled_weight_decay"] = True
    for precondition in ("diagonal", "spectral", Signs()):
        (group,) = Neumann(network().parameters(), 0.01, precondition=precondition).param_groups
        assert {name: group[name] for name in usual} == usual
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


def test_two_that_keep_the_same_are_refused():
    with pytest.raises(ValueError, match="'spectral' and one before it both keep 'second_moment'"):
        trained(1, precondition=Spectral(before=Diagonal()))


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


@pytest.mark.parametrize("name", ["diagonal", "spectral"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_resumed_run_has_the_same_bits(name, form):
    whole, _ = trained(12, precondition=name, **form)
    model, optimizer = trained(5, precondition=name, **form)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again = network(seed=1)
    again.load_state_dict(saved[0])
    resumed = Neumann(again.named_parameters(), lr=0.5, precondition=name, **CLOCK, **form)
    resumed.load_state_dict(saved[1])
    trained(7, again, resumed, first=5)
    assert torch.equal(weights(again), weights(whole))


def test_a_state_dict_says_which_preconditioner_it_is_of():
    _, optimizer = trained(3, precondition="diagonal")
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["precondition"] == "diagonal"
    other = Neumann(network().named_parameters(), lr=0.01, **CLOCK)
    other.load_state_dict(saved)  # as every other option, it is adopted
    assert other.param_groups[0]["precondition"] == "diagonal"
    assert all("preconditioner_second_moment" in state for state in other.state.values())


@dataclass(frozen=True)
class Signs:
    """A preconditioner of one's own: signs of the mean gradient."""

    name = "signs"

    def elementwise(self, parameter):
        return True

    def create(self, parameter):
        return {"mean": torch.zeros_like(parameter)}

    def apply(self, gradients, states):
        means = [
            state["mean"].mul_(0.9).add_(g) for g, state in zip(gradients, states, strict=True)
        ]
        return [mean.sign() for mean in means]


def test_a_preconditioner_of_ones_own():
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
    optimizer = Neumann(groups, lr=0.01, **CLOCK)
    trained(3, model, optimizer)
    assert optimizer.param_groups[1]["precondition"] is None
    assert not any(key.startswith("precond") for p in rest for key in optimizer.state[p])


def test_one_may_be_chosen_in_mid_training():
    model, optimizer = trained(3)
    optimizer.param_groups[0]["precondition"] = "diagonal"
    trained(3, model, optimizer, first=3)
    assert torch.isfinite(weights(model)).all()


def test_a_skipped_step_leaves_its_memory_alone():
    model, optimizer = trained(3, precondition="diagonal", skip_nonfinite=True)
    before = [copy.deepcopy(state) for state in optimizer.state.values()]
    gradients(model, 3)
    next(model.parameters()).grad.fill_(torch.inf)
    optimizer.step()
    for state, old in zip(optimizer.state.values(), before, strict=True):
        for key in ("preconditioner_second_moment", "preconditioner_seen"):
            assert torch.equal(state[key], old[key])


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


def test_options_of_the_diagonal():
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\)"):
        Diagonal(decay=1.0)
    with pytest.raises(ValueError, match="scale above 0"):
        Diagonal(scale=0.0)
    with pytest.raises(ValueError, match="records no preconditioner"):
        Neumann(
            network().parameters(), lr=0.1, precondition="diagonal", differentiable=True, **CLOCK
        )


@pytest.mark.parametrize("name", ["diagonal", "spectral"])
def test_a_compiled_step(name):
    model = network()
    optimizer = Neumann(model.named_parameters(), lr=0.01, precondition=name, **CLOCK)
    step = torch.compile(lambda: optimizer.step(), fullgraph=True, backend="aot_eager")
    for number in range(12):
        gradients(model, number)
        step()
    torch.testing.assert_close(weights(model), weights(trained(precondition=name)[0]))
