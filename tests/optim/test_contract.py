"""The contract of torch.optim: groups, closures, schedulers, copies, flags."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from neumann import Neumann
from tests.support.oracle_runs import IMPLEMENTATIONS
from tests.support.small_model import CLOCK, STRONG, equal, model_and_optimizer, train, weights

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
    assert optimizer._store.count_variables() == sum(p.numel() for p in model.parameters())
    model[0].requires_grad_(False)
    assert optimizer._store.count_variables() == sum(p.numel() for p in model[2].parameters())
    assert Neumann(model.parameters(), lr=0.1, **CLOCK)._store.count_variables() == 2


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


def test_frozen_models_keep_the_clock():
    model, _ = model_and_optimizer()
    model.requires_grad_(False)
    optimizer = Neumann(model.parameters(), lr=0.1, **CLOCK)
    for _ in range(4):
        optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]})
    assert optimizer.diagnostics().step == 4


# ---------------------------------------------------------------------- closures


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


def test_a_closure_that_ends_in_evaluation_mode_is_refused():
    _, optimizer = model_and_optimizer()
    with pytest.raises(RuntimeError, match="evaluation mode"):
        optimizer.step(lambda: float(optimizer.eval().training))
    assert optimizer.diagnostics().step == 0


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


@pytest.mark.filterwarnings("ignore:a scheduler cycles the momentum")
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


def test_copies_and_pickles_continue_the_same_way():
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


def test_repr():
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


def test_a_saved_optimizer_loads_with_weights_only():
    model, optimizer = model_and_optimizer(lr=torch.tensor(0.1))
    train(model, optimizer, 5)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    optimizer.load_state_dict(torch.load(buffer, weights_only=True))


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
