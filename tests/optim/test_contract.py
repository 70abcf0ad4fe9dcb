"""The contract of torch.optim: groups, gradients, schedulers, copies, flags, bad input."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from neumann import Neumann
from oracle_runs import IMPLEMENTATIONS

CLOCK = {"warmup_steps": 3, "reset_steps": 4}
STRONG = {"cubic": 0.05, "repulsive": 0.05}


def model_and_optimizer(named=True, dtype=torch.float64, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    params = model.named_parameters() if named else model.parameters()
    return model, Neumann(params, **{"lr": 0.1, **CLOCK, **options})


def train(model, optimizer, steps=1, start=0, scheduler=None):
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 5, generator=generator).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---------------------------------------------------------------------- groups


def test_the_distance_is_one_number_over_all_groups():
    """Two groups with the same options are one optimizer, not two."""
    model, together = model_and_optimizer(named=False, **STRONG)
    train(model, together, 20)
    other = copy.deepcopy(model)
    torch.manual_seed(0)
    other.load_state_dict(
        nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double().state_dict()
    )
    split = Neumann(
        [{"params": other[0].parameters()}, {"params": other[2].parameters()}],
        lr=0.1,
        **CLOCK,
        **STRONG,
    )
    train(other, split, 20)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-13)


def test_groups_may_differ_in_lr_momentum_and_decay():
    model, optimizer = model_and_optimizer()
    groups = [
        {"params": model[0].parameters(), "lr": 0.2, "weight_decay": 0.1},
        {"params": model[2].parameters(), "momentum": 0.5, "decoupled_weight_decay": True},
    ]
    optimizer = Neumann(groups, lr=0.1, **CLOCK)
    train(model, optimizer, 12)
    found = optimizer.diagnostics()
    assert [group.lr for group in found.groups] == [0.2, 0.1]
    assert [group.momentum for group in found.groups] == pytest.approx([0.9, 0.5])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cubic", 1.0),
        ("repulsive", 1.0),
        ("average", 0.5),
        ("bounded", False),
        ("variables", 7),
        ("warmup_steps", 99),
        ("reset_steps", 99),
        ("reset_growth", 3.0),
        ("skip_nonfinite", True),
        ("differentiable", True),
    ],
)
def test_groups_must_agree_in_what_is_shared(name, value):
    model, optimizer = model_and_optimizer()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), name: value}]
    with pytest.raises(ValueError, match=f"{name} must agree"):
        Neumann(groups, lr=0.1, **CLOCK)
    extra = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=f"{name} must agree"):
        optimizer.add_param_group({"params": [("extra", extra)], name: value})
    assert len(optimizer.param_groups) == 1
    assert extra not in optimizer.state
    two = Neumann([{"params": p} for p in model.parameters()], lr=0.1, **CLOCK)
    two.param_groups[1][name] = value
    before = weights(model)
    with pytest.raises(ValueError, match=f"{name} must agree"):
        train(model, two)
    assert equal(before, weights(model))


def test_a_group_added_in_mid_training_joins_the_clock():
    model, optimizer = model_and_optimizer(named=False, **STRONG)
    train(model, optimizer, 6)
    late = nn.Parameter(torch.ones(4, dtype=torch.float64))
    optimizer.add_param_group({"params": [late], "lr": 0.5})
    assert int(optimizer.state[late]["step"]) == 6
    late.grad = torch.full_like(late, 2.0)
    train_late = late.detach().clone()
    train(model, optimizer, 1, start=6)  # t = 4: iterate; zero_grad cleared the late gradient
    assert torch.equal(late, train_late)
    late.grad = torch.full_like(late, 2.0)
    optimizer.step()  # t = 5: reset
    assert torch.equal(late, train_late)
    late.grad = torch.full_like(late, 2.0)
    optimizer.step()
    assert int(optimizer.state[late]["step"]) == 9
    assert not torch.equal(late, train_late)


def test_named_parameters_keep_their_names():
    model, optimizer = model_and_optimizer()
    assert list(optimizer.eval_params()) == [name for name, _ in model.named_parameters()]
    assert list(optimizer.average_params()) == list(optimizer.eval_params())
    _, unnamed = model_and_optimizer(named=False)
    assert isinstance(unnamed.eval_params(), list)


def test_frozen_parameters_cost_nothing_and_may_thaw():
    model, _ = model_and_optimizer()
    model[0].requires_grad_(False)
    optimizer = Neumann(model.parameters(), lr=0.1, **CLOCK)
    assert set(optimizer.state) == set(model[2].parameters())
    frozen = weights(model[0])
    train(model, optimizer, 6)
    assert equal(frozen, weights(model[0]))
    model[0].requires_grad_(True)
    train(model, optimizer, 6, start=6)
    assert not equal(frozen, weights(model[0]))
    assert int(optimizer.state[model[0].weight]["step"]) == 12


def test_variables_counts_parameters_that_require_gradients():
    model, optimizer = model_and_optimizer(variables="elements")
    assert optimizer._count_variables() == sum(p.numel() for p in model.parameters())
    model[0].requires_grad_(False)
    assert optimizer._count_variables() == sum(p.numel() for p in model[2].parameters())
    assert Neumann(model.parameters(), lr=0.1, **CLOCK)._count_variables() == 2


def test_state_exists_before_the_first_step():
    model, optimizer = model_and_optimizer()
    assert set(optimizer.state) == set(model.parameters())
    clocks = {id(state["step"]) for state in optimizer.state.values()}
    assert len(clocks) == 1
    assert int(next(iter(optimizer.state.values()))["step"]) == 0


def test_without_forces_the_offset_is_not_kept_and_they_may_come_back():
    model, optimizer = model_and_optimizer(cubic=0.0, repulsive=0.0)
    assert all("offset" not in state for state in optimizer.state.values())
    train(model, optimizer, 10)
    with pytest.raises(RuntimeError, match="average is kept only"):
        optimizer.average_params()
    optimizer.param_groups[0]["repulsive"] = 1e-3
    average_from_here = weights(model)
    train(model, optimizer, 1, start=10)  # t = 8
    assert optimizer.diagnostics().distance > 0
    moved = [
        (1 - 0.99) * now + 0.99 * before
        for now, before in zip(weights(model), average_from_here, strict=True)
    ]
    for v, expected in zip(optimizer.average_params().values(), moved, strict=True):
        assert torch.allclose(v, expected, rtol=1e-12)
    optimizer.param_groups[0]["repulsive"] = 0.0
    train(model, optimizer, 1, start=11)
    assert all("offset" not in state for state in optimizer.state.values())


# ---------------------------------------------------------------------- gradients


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_are_never_changed(implementation):
    model, optimizer = model_and_optimizer(
        weight_decay=0.1, maximize=True, **STRONG, **IMPLEMENTATIONS[implementation]
    )
    for step in range(12):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.5 + step)
        optimizer.step()
        assert all(torch.all(p.grad == 0.5 + step) for p in model.parameters())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_complex_parameters_are_pairs_of_reals(implementation):
    options = {"lr": 0.1, **CLOCK, **STRONG, "weight_decay": 0.1, "variables": 1}
    start = torch.randn(6, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
    whole, pair = nn.Parameter(start.clone()), nn.Parameter(torch.view_as_real(start.clone()))
    ours = Neumann([whole], **options, **IMPLEMENTATIONS[implementation])
    theirs = Neumann([pair], **options, **IMPLEMENTATIONS[implementation])
    for step in range(30):
        noise = torch.randn(
            6, dtype=torch.complex128, generator=torch.Generator().manual_seed(step)
        )
        conjugated = (whole.detach() + noise).conj().resolve_conj().conj()
        assert conjugated.is_conj()
        whole.grad = conjugated
        pair.grad = torch.view_as_real(torch.view_as_complex(pair.detach()) + noise)
        ours.step()
        theirs.step()
    assert torch.allclose(torch.view_as_real(whole.detach()), pair, rtol=1e-12)
    assert ours.diagnostics().distance == pytest.approx(theirs.diagnostics().distance)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scalars_empty_tensors_and_other_layouts(implementation):
    """A transposed or sliced gradient or parameter gives what a contiguous one gives."""
    options = {"lr": 0.1, **CLOCK, **STRONG, **IMPLEMENTATIONS[implementation]}
    scalar = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    empty = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
    start = torch.arange(12.0, dtype=torch.float64).reshape(3, 4) - 5
    plain = nn.Parameter(start.clone())
    strided = nn.Parameter(start.t().contiguous().t())
    sliced = nn.Parameter(torch.stack([start, start], dim=-1)[..., 0])
    assert not strided.is_contiguous()
    assert not sliced.is_contiguous()
    optimizer = Neumann([scalar, empty, plain, strided, sliced], **options)
    for step in range(20):
        gradient = (start + step) / 10
        scalar.grad = torch.tensor(0.3, dtype=torch.float64)
        empty.grad = torch.empty(0, 3, dtype=torch.float64)
        plain.grad = gradient.t().contiguous().t()
        strided.grad = gradient.clone()
        sliced.grad = gradient.clone()
        optimizer.step()
    assert torch.equal(plain, strided)
    assert torch.equal(plain, sliced)
    assert not torch.equal(plain, start)
    assert scalar != 2.0


@pytest.mark.filterwarnings("ignore:parameter 0 of group 0 was changed")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_computes_in_float32(implementation, dtype):
    """One rounding a step: the result is the float32 step, rounded.

    To nearest, but for bfloat16 state, which is rounded to either neighbour.
    """
    options = {"lr": 0.1, **CLOCK, **STRONG, **IMPLEMENTATIONS[implementation]}
    start = torch.linspace(-2, 2, 33).to(dtype)
    half, full = nn.Parameter(start.clone()), nn.Parameter(start.float())
    ours, theirs = Neumann([half], **options), Neumann([full], **options)
    for step in range(15):
        gradient = torch.randn(33, generator=torch.Generator().manual_seed(step)).to(dtype)
        with torch.no_grad():  # both start each step from the same bits
            full.copy_(half)
            for key in ("iterate", "offset"):
                theirs.state[full][key].copy_(ours.state[half][key])
            theirs._measure_distance()
        half.grad, full.grad = gradient, gradient.float()
        ours.step()
        theirs.step()
        assert torch.equal(half, full.to(dtype))
        for key in ("iterate", "offset"):
            assert ours.state[half][key].dtype == dtype
            found, exact = ours.state[half][key].float(), theirs.state[full][key]
            if dtype == torch.float16:
                assert torch.equal(found, exact.to(dtype).float())
            else:
                assert torch.all((found - exact).abs() <= 2**-7 * exact.abs())
                assert torch.equal(found == exact, exact == exact.to(dtype).float())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_gradient_of_another_dtype(implementation):
    """Weights cast after backward leave gradients of the old dtype behind."""
    p = nn.Parameter(torch.ones(5, dtype=torch.float64))
    optimizer = Neumann([p], lr=0.1, **CLOCK, **IMPLEMENTATIONS[implementation])
    q = nn.Parameter(torch.ones(5, dtype=torch.float32))
    other = Neumann([q], lr=0.1, **CLOCK, **IMPLEMENTATIONS[implementation])
    for _ in range(10):
        p.grad = torch.full((5,), 0.25, dtype=torch.float64)
        q.grad = torch.full((5,), 0.25, dtype=torch.float32)
        optimizer.step()
        other.step()
    assert torch.allclose(p.float(), q)
    mixed = nn.Parameter(torch.ones(5, dtype=torch.float64))
    mixed.grad = torch.full((5,), 0.25, dtype=torch.float64)
    optimizer = Neumann([mixed], lr=0.1, **CLOCK, **IMPLEMENTATIONS[implementation])
    mixed.data = mixed.data.to(torch.bfloat16)  # the gradient stays float64
    assert mixed.grad.dtype == torch.float64
    optimizer.step()
    assert mixed.dtype == torch.bfloat16
    assert torch.equal(mixed.detach(), torch.full((5,), 1 - 0.1 * 0.25).bfloat16())


def test_sparse_gradients_are_refused_by_name():
    embedding = nn.Embedding(4, 3, sparse=True)
    dense = nn.Linear(3, 1)
    model = nn.Sequential(embedding, dense)
    optimizer = Neumann(model.named_parameters(), lr=0.1, **CLOCK)
    before = weights(model)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradients, and 0\.weight has one"):
        optimizer.step()
    assert equal(before, weights(model))
    assert optimizer.diagnostics().step == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_missing_gradient_leaves_the_parameter_alone(implementation):
    model, optimizer = model_and_optimizer(**STRONG, **IMPLEMENTATIONS[implementation])
    train(model, optimizer, 5)
    still = model[0].weight
    before, distance = still.detach().clone(), optimizer.state[still]["offset"].norm()
    for _ in range(2):  # t = 3, 4: iterate
        for p in model.parameters():
            p.grad = None if p is still else torch.ones_like(p)
        optimizer.step()
    assert torch.equal(still, before)
    assert optimizer.state[still]["iterate"].abs().sum() > 0
    assert optimizer.diagnostics().distance > distance > 0  # its offset still counts
    optimizer.state[still]["iterate"][0, 0] = float("nan")
    optimizer.step()  # t = 5: reset
    assert torch.equal(optimizer.state[still]["iterate"], torch.zeros_like(still))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_does_not_survive_a_reset_in_the_iterate(implementation):
    model, optimizer = model_and_optimizer(**IMPLEMENTATIONS[implementation])
    train(model, optimizer, 7)
    for state in optimizer.state.values():
        state["iterate"].fill_(float("nan"))
    train(model, optimizer, 1, start=7)  # t = 5: reset
    assert optimizer.diagnostics().phase == "reset"
    assert all(torch.isfinite(p).all() for p in optimizer.eval_params().values())


def test_nonfinite_gradients_are_skipped_when_asked():
    model, optimizer = model_and_optimizer(skip_nonfinite=True, **STRONG)
    control, reference = model_and_optimizer(**STRONG)
    bad = [float("nan"), float("inf"), -float("inf")]
    for step in range(20):
        train(control, reference, 1, start=step)
        if step % 6 == 1:
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            model[2].bias.grad[1] = bad[step % 3]
            before = copy.deepcopy(optimizer.state_dict()["state"])
            evaluation = optimizer.eval_params()
            optimizer.step()
            assert equal(evaluation.values(), optimizer.eval_params().values())
            for index, entry in optimizer.state_dict()["state"].items():
                for key, value in entry.items():
                    assert torch.equal(value, before[index][key] + (key == "skipped"))
        train(model, optimizer, 1, start=step)
    assert equal(weights(model), weights(control))
    found = optimizer.diagnostics()
    assert (found.step, found.skipped) == (20, 4)
    assert int(optimizer.state[model[0].weight]["skipped"]) == 4


def test_a_skipped_step_keeps_even_an_average_that_is_no_longer_needed():
    model, optimizer = model_and_optimizer(skip_nonfinite=True, **STRONG)
    train(model, optimizer, 8)
    optimizer.param_groups[0].update(cubic=0.0, repulsive=0.0)
    for p in model.parameters():
        p.grad = torch.full_like(p, float("nan"))
    optimizer.step()
    assert all("offset" in state for state in optimizer.state.values())


def test_an_imaginary_part_may_overflow_too():
    p = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    optimizer = Neumann([p], lr=0.1, **CLOCK, skip_nonfinite=True)
    p.grad = torch.tensor([0j, complex(0, float("inf"))])
    optimizer.step()
    assert optimizer.diagnostics().skipped == 1


def test_large_finite_gradients_are_not_skipped():
    p = nn.Parameter(torch.zeros(3))
    optimizer = Neumann([p], lr=1e-30, **CLOCK, skip_nonfinite=True)
    p.grad = torch.full((3,), 3e38)  # its sum of squares overflows
    optimizer.step()
    assert optimizer.diagnostics().skipped == 0


def test_nonfinite_gradients_pass_by_default():
    model, optimizer = model_and_optimizer()
    for p in model.parameters():
        p.grad = torch.full_like(p, float("nan"))
    optimizer.step()
    assert all(torch.isnan(p).all() for p in model.parameters())


def test_closure():
    model, optimizer = model_and_optimizer()
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(torch.ones(2, 5, dtype=torch.float64)).square().mean()
        loss.backward()
        return loss

    with torch.no_grad():
        losses = [float(optimizer.step(closure)) for _ in range(10)]
    assert calls == [True] * 10
    assert losses[-1] < losses[0]


# ---------------------------------------------------------------------- schedulers

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda s: 0.9**s),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda s: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "OneCycleLR, momentum fixed": lambda o: lr_scheduler.OneCycleLR(
        o, 0.1, total_steps=20, cycle_momentum=False
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [5]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # SequentialLR's own, in torch 2.6
@pytest.mark.parametrize("name", SCHEDULERS)
def test_torch_schedulers(name):
    """The schedule acts: steps under it are steps at the values it set."""
    model, optimizer = model_and_optimizer(**STRONG)
    control, by_hand = model_and_optimizer(**STRONG)
    scheduler = SCHEDULERS[name](optimizer)
    for step in range(15):
        by_hand.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        by_hand.param_groups[0]["momentum"] = optimizer.param_groups[0]["momentum"]
        train(model, optimizer, 1, start=step, scheduler=scheduler)
        train(control, by_hand, 1, start=step)
        # A scheduler that moves momentum after the step must not move the evaluation weights.
        assert equal(optimizer.eval_params().values(), by_hand.eval_params().values())
    assert equal(weights(model), weights(control))


def test_reduce_on_plateau():
    model, optimizer = model_and_optimizer()
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(4):
        train(model, optimizer, 1, start=step)
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] < 0.1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tensor_lr(implementation):
    with_tensor, optimizer = model_and_optimizer(
        lr=torch.tensor(0.1, dtype=torch.float64), **IMPLEMENTATIONS[implementation]
    )
    with_float, other = model_and_optimizer(**IMPLEMENTATIONS[implementation])
    schedulers = [lr_scheduler.CosineAnnealingLR(o, 20) for o in (optimizer, other)]
    train(with_tensor, optimizer, 15, scheduler=schedulers[0])
    train(with_float, other, 15, scheduler=schedulers[1])
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    for a, b in zip(with_tensor.parameters(), with_float.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


# ---------------------------------------------------------------------- copies and words


def test_deepcopy_and_pickle_go_on_alike():
    model, optimizer = model_and_optimizer(**STRONG)
    train(model, optimizer, 9)
    copied = copy.deepcopy((model, optimizer))
    pickled = pickle.loads(pickle.dumps((model, optimizer)))
    train(model, optimizer, 9, start=9)
    for other_model, other in (copied, pickled):
        assert other_model[0].weight is other.param_groups[0]["params"][0]
        train(other_model, other, 9, start=9)
        assert equal(weights(model), weights(other_model))
        assert other.diagnostics().as_dict() == optimizer.diagnostics().as_dict()
        assert len({id(state["step"]) for state in other.state.values()}) == 1


def test_repr_reads_well():
    model, optimizer = model_and_optimizer()
    train(model, optimizer, 5)
    text = repr(optimizer)
    for part in ("step=5", "'iterate'", "t=2", "lr=0.1", "4 tensors, 75 weights", "cubic=1e-07"):
        assert part in text
    assert "0.weight" not in text  # a hundred names are not readable
    assert len(text.splitlines()) == 3


def test_hooks_run():
    model, optimizer = model_and_optimizer()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    train(model, optimizer, 2)
    assert seen == ["pre", "post"] * 2


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, r"lr must be .* got -0\.1"),
        ({"lr": float("nan")}, "lr must be .* got nan"),
        ({"lr": float("inf")}, "lr must be .* got inf"),
        ({"lr": "0.1"}, r"lr must be .* got '0\.1'"),
        ({"lr": torch.tensor(-1.0)}, "lr must be .* got tensor"),
        ({"lr": torch.ones(2)}, "lr must be .* got tensor"),
        ({"average": 1.0}, r"average must be in \[0, 1\), got 1\.0"),
        ({"average": -0.1}, "average must be"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1\.0"),
        ({"momentum": -0.5}, "momentum must be"),
        ({"momentum": float("nan")}, "momentum must be"),
        ({"reset_growth": 0.5}, r"reset_growth must be at least 1, got 0\.5"),
        ({"reset_growth": float("inf")}, "reset_growth must be"),
        ({"cubic": -1e-7}, "cubic must be"),
        ({"repulsive": float("nan")}, "repulsive must be"),
        ({"weight_decay": -1}, "weight_decay must be .* got -1"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be .* got 0"),
        ({"steps_per_epoch": float("nan")}, "steps_per_epoch must be"),
        ({"warmup_steps": -1}, "warmup_steps must be .* got -1"),
        ({"warmup_steps": 2.5}, r"warmup_steps must be .* got 2\.5"),
        ({"reset_steps": -1}, "reset_steps must be"),
        ({"warmup_steps": None, "steps_per_epoch": 5, "warmup_epochs": -1}, "warmup_epochs must"),
        ({"reset_steps": 1, "reset_growth": 1.0}, "never move"),
        ({"variables": "scalars"}, "variables must be .* got 'scalars'"),
        ({"variables": 0}, "variables must be .* got 0"),
        ({"variables": True}, "variables must be .* got True"),
        ({"state_dtype": torch.int8}, "state_dtype must be None or a torch dtype"),
        ({"bounded": "no"}, "bounded must be True or False, got 'no'"),
        ({"foreach": "yes"}, "foreach must be True or False"),
        ({"warmup_epochs": float("nan")}, "warmup_epochs must be"),
        ({"reset_epochs": -3}, "reset_epochs must be .* got -3"),
        ({"precondition": "spectrall"}, "precondition must be None"),
        ({"foreach": True, "differentiable": True}, "exclude each other"),
        ({"foreach": True, "fused": True}, "exclude each other"),
        ({"differentiable": True, "fused": True}, "exclude each other"),
    ],
)
def test_bad_options(options, message):
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=message):
        Neumann([p], **{"lr": 0.1, **CLOCK, **options})
    assert torch.equal(p, torch.ones(2))


@pytest.mark.parametrize(
    ("clock", "message"),
    [
        ({}, "pass steps_per_epoch=len"),
        ({"warmup_steps": 5}, "reset_steps is None and so is steps_per_epoch"),
        ({"reset_steps": 5}, "warmup_steps is None and so is steps_per_epoch"),
    ],
)
def test_a_missing_clock_says_what_to_pass(clock, message):
    with pytest.raises(ValueError, match=message):
        Neumann([nn.Parameter(torch.ones(2))], lr=0.1, **clock)


@pytest.mark.parametrize(
    ("clock", "expected"),
    [
        ({"steps_per_epoch": 7}, (35, 70)),
        ({"steps_per_epoch": 7, "warmup_steps": 3}, (3, 70)),
        ({"steps_per_epoch": 7, "reset_steps": 0}, (35, 0)),
        ({"steps_per_epoch": 5, "warmup_epochs": 0.5, "reset_epochs": 0.1}, (3, 1)),
        ({"steps_per_epoch": 5, "warmup_epochs": 0.1, "reset_epochs": 0.01}, (1, 1)),
        ({"steps_per_epoch": 5, "warmup_epochs": 0, "reset_epochs": 0}, (0, 0)),
    ],
)
def test_epochs_become_steps_rounded_half_up(clock, expected):
    optimizer = Neumann([nn.Parameter(torch.ones(2))], lr=0.1, **clock)
    group = optimizer.param_groups[0]
    assert (group["warmup_steps"], group["reset_steps"]) == expected


def test_no_parameters_and_the_same_twice():
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="empty parameter list"):
        Neumann([], lr=0.1, **CLOCK)
    with pytest.raises(ValueError, match="params must hold at least one"):
        Neumann([{"params": []}], lr=0.1, **CLOCK)
    with pytest.raises(ValueError, match="same parameter twice: number 1"):
        Neumann([p, p], lr=0.1, **CLOCK)
    with pytest.raises(ValueError, match="same parameter twice: 'y'"):
        Neumann([("x", p), ("y", p)], lr=0.1, **CLOCK)
    groups = [{"params": nn.Linear(2, 2).named_parameters()} for _ in "ab"]
    with pytest.raises(ValueError, match="two parameters 'weight': names must differ"):
        Neumann(groups, lr=0.1, **CLOCK)
    with pytest.raises(ValueError, match=r"conjugate view, number 0, .* pass resolve_conj"):
        Neumann([nn.Parameter(torch.ones(2, dtype=torch.complex64).conj())], lr=0.1, **CLOCK)
    with pytest.raises(ValueError, match="more than one parameter group"):
        Neumann([{"params": [p]}, {"params": [p]}], lr=0.1, **CLOCK)
    with pytest.raises(TypeError, match="must be a dict"):
        Neumann([p], lr=0.1, **CLOCK).add_param_group([p])


def test_a_group_cannot_have_its_own_epochs():
    groups = [{"params": [nn.Parameter(torch.ones(2))], "warmup_epochs": 2}]
    with pytest.raises(ValueError, match="pass warmup_epochs to Neumann itself"):
        Neumann(groups, lr=0.1, steps_per_epoch=5)


def test_a_bad_value_in_any_group_stops_before_the_weights():
    model, _ = model_and_optimizer()
    optimizer = Neumann([{"params": [p]} for p in model.parameters()], lr=0.1, **CLOCK)
    optimizer.param_groups[3]["lr"] = -1.0
    before = weights(model)
    with pytest.raises(ValueError, match="lr must be"):
        train(model, optimizer, 1)
    assert equal(before, weights(model))


def test_numpy_numbers_do_not_get_into_checkpoints():
    options = {"warmup_steps": np.int64(3), "reset_steps": np.int32(4), "momentum": np.float32(0.5)}
    optimizer = Neumann(
        [{"params": [nn.Parameter(torch.ones(2))], "lr": np.float64(0.2)}],
        np.float32(0.1),
        **options,
    )
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)["param_groups"][0]
    assert (loaded["lr"], loaded["warmup_steps"], loaded["momentum"]) == (0.2, 3, 0.5)


def test_a_closure_that_ends_in_evaluation_mode_is_refused():
    _, optimizer = model_and_optimizer()
    with pytest.raises(RuntimeError, match="evaluation mode"):
        optimizer.step(lambda: float(optimizer.eval().training))
    assert optimizer.diagnostics().step == 0


def test_frozen_models_keep_the_clock():
    model, _ = model_and_optimizer()
    model.requires_grad_(False)
    optimizer = Neumann(model.parameters(), lr=0.1, **CLOCK)
    for _ in range(4):
        optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]})
    assert optimizer.diagnostics().step == 4


@pytest.mark.parametrize(
    ("name", "value"), [("lr", -1.0), ("lr", float("nan")), ("momentum", 1.5), ("weight_decay", -1)]
)
def test_a_bad_value_set_later_stops_before_the_weights(name, value):
    model, optimizer = model_and_optimizer()
    train(model, optimizer, 5)
    before = weights(model)
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=f"{name} must be"):
        train(model, optimizer, 1)
    assert equal(before, weights(model))
    assert optimizer.diagnostics().step == 5


def test_a_saved_optimizer_loads_with_weights_only():
    model, optimizer = model_and_optimizer(lr=torch.tensor(0.1))
    train(model, optimizer, 5)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    optimizer.load_state_dict(torch.load(buffer, weights_only=True))
