"""Choosing the fused step, low-precision state, GradScaler, and weights changed from outside."""

import copy
import threading
import warnings

import pytest
import torch
from torch import nn

from neumann import Neumann
from neumann.optim.backends import choose_backend
from neumann.optim.backends.cpu import numba_pass
from neumann.optim.backends.cuda import TritonBackend
from tests.support.oracle_runs import (
    FUSED,
    IMPLEMENTATIONS,
    Run,
    deviation,
    finished,
    finished_oracle,
)
from tests.support.small_model import CLOCK, STRONG, equal, model_and_optimizer, train, weights

needs_numba = pytest.mark.skipif("numba" not in FUSED, reason="numba is not installed")


def chosen(**options):
    return model_and_optimizer(**options)[1]._backend.name


# ---------------------------------------------------------------------- which one


@needs_numba
def test_fused_is_chosen_where_it_can_run():
    assert chosen() == "numba"
    assert chosen(fused=True) == "numba"
    assert chosen(fused=False) == "lists"


def test_explicit_flags_turn_it_off():
    assert chosen(foreach=True) == "lists"
    assert chosen(foreach=False) == "reference"
    assert chosen(differentiable=True) == "reference"


def test_without_numba_the_default_falls_back_and_fused_raises(monkeypatch):
    monkeypatch.setattr(numba_pass, "unavailable", lambda: "numba is missing: install it")
    assert chosen() == "lists"
    with pytest.raises(RuntimeError, match="fused=True cannot run here: numba is missing"):
        chosen(fused=True)


def test_where_there_is_no_kernel():
    meta = [nn.Parameter(torch.ones(2, device="meta"))]
    options = Neumann(meta, 0.1, **CLOCK).param_groups[0]
    assert choose_backend(options, {meta[0].device}).name == "lists"
    with pytest.raises(RuntimeError, match="there is no kernel for meta"):
        Neumann(meta, 0.1, fused=True, **CLOCK)
    mixed = [*meta, nn.Parameter(torch.ones(2))]
    with pytest.raises(RuntimeError, match="must be on one device, and are on cpu, meta"):
        Neumann(mixed, 0.1, fused=True, **CLOCK)


def test_a_refused_group_is_not_added():
    optimizer = Neumann([nn.Parameter(torch.ones(2))], 0.1, fused=bool(FUSED) or None, **CLOCK)
    if not FUSED:
        pytest.skip("numba is not installed")
    with pytest.raises(RuntimeError, match="must be on one device"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, device="meta"))]})
    assert len(optimizer.param_groups) == 1


def test_rocm_falls_back_to_lists(monkeypatch):
    """There torch reports devices of type "cuda" too, and the kernel has never run on one."""
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "ROCm" in TritonBackend.unavailable(1)
    options = model_and_optimizer()[1].param_groups[0]
    devices = {torch.device("cuda", 0)}
    assert choose_backend(options, devices).name == "lists"
    with pytest.raises(RuntimeError, match=r"fused=True cannot run here: .* built for ROCm"):
        choose_backend({**options, "fused": True}, devices)


def test_capturable_needs_cuda():
    message = r"capturable=True needs the fused CUDA kernel, .*: the parameters are on the CPU$"
    with pytest.raises(RuntimeError, match=message):
        chosen(capturable=True)
    with pytest.raises(ValueError, match="leave foreach at its default"):
        chosen(capturable=True, foreach=True)


# ---------------------------------------------------------------------- low-precision state

LOW = Run([{"sizes": (7, 1000), "lr": 0.05}], steps=300, options={"cubic": 1e-3, "repulsive": 1e-2})
# bfloat16 has 8 bits: one rounding errs by up to 2^-8 of δ, which is what v = w − δ then errs by.
BFLOAT16_BOUND = 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [i for i in IMPLEMENTATIONS if i != "triton"])
def test_bfloat16_state_stays_within_its_bound(implementation):
    optimizer = finished(
        LOW, torch.float32, state_dtype=torch.bfloat16, **IMPLEMENTATIONS[implementation]
    )
    for state in optimizer.state.values():
        assert state["iterate"].dtype == state["offset"].dtype == torch.bfloat16
    error = deviation(optimizer, finished_oracle(LOW))
    assert 1e-6 < error < BFLOAT16_BOUND


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [i for i in IMPLEMENTATIONS if i != "triton"])
def test_stochastic_rounding_has_no_dead_band(implementation):
    """Under a constant drift δ settles at s·γ/(1−γ); rounded to nearest it stops 20 % short."""
    p = nn.Parameter(torch.zeros(2000))
    optimizer = Neumann(
        [p],
        lr=0.01,
        warmup_steps=0,
        reset_steps=0,
        cubic=1e-30,
        repulsive=0.0,
        state_dtype=torch.bfloat16,
        **IMPLEMENTATIONS[implementation],
    )
    for _ in range(800):
        p.grad = torch.full((2000,), 0.1)
        optimizer.step()
    drift = -0.01 * 0.1 / (1 - 0.9)
    offset = optimizer.state[p]["offset"].double().mean()
    assert float(offset) == pytest.approx(drift * 0.99 / 0.01, rel=0.01)


@pytest.mark.filterwarnings("ignore:parameter 0 of group 0 was changed")
@pytest.mark.parametrize("implementation", [i for i in IMPLEMENTATIONS if i != "triton"])
def test_wider_state_than_weights(implementation):
    p = nn.Parameter(torch.linspace(1, 2, 50).bfloat16())
    q = nn.Parameter(p.detach().float())
    options = {**CLOCK, **STRONG, **IMPLEMENTATIONS[implementation]}
    narrow = Neumann([p], lr=0.01, state_dtype=torch.float32, **options)
    wide = Neumann([q], lr=0.01, **options)
    for step in range(12):
        gradient = torch.randn(50, generator=torch.Generator().manual_seed(step)).bfloat16()
        with torch.no_grad():
            q.copy_(p)
        p.grad, q.grad = gradient, gradient.float()
        narrow.step()
        wide.step()
        assert narrow.state[p]["iterate"].dtype == torch.float32
        assert torch.allclose(narrow.state[p]["iterate"], wide.state[q]["iterate"], rtol=1e-5)
        assert torch.equal(p, q.to(torch.bfloat16))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_resuming_with_bfloat16_state_has_the_same_bits(implementation):
    options = {"dtype": torch.float32, "state_dtype": torch.bfloat16, **STRONG}
    options |= IMPLEMENTATIONS[implementation]
    model, optimizer = model_and_optimizer(**options)
    train(model, optimizer, 8)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 6, start=8)
    fresh, other = model_and_optimizer(**options)
    fresh.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(fresh, other, 6, start=8)
    assert equal(weights(model), weights(fresh))


# ---------------------------------------------------------------------- GradScaler


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_grad_scaler_skips_and_unscales(implementation):
    """An injected overflow changes no weight, state or clock; other steps are as without scaler."""
    options = {"dtype": torch.float32, **STRONG, **IMPLEMENTATIONS[implementation]}
    model, optimizer = model_and_optimizer(**options)
    control, reference = model_and_optimizer(**options)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)
    for step in range(14):
        x = torch.randn(16, 5, generator=torch.Generator().manual_seed(step))
        overflow = step in (1, 4, 9)
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        if overflow:
            model[0].weight.grad[0, 0] = float("inf")
        before = copy.deepcopy((weights(model), optimizer.diagnostics().as_dict()))
        scaler.step(optimizer)
        scaler.update()
        if overflow:
            assert equal(weights(model), before[0])
            assert optimizer.diagnostics().as_dict() == before[1]
            continue
        reference.zero_grad()
        control(x).square().mean().backward()
        reference.step()
        for a, b in zip(weights(model), weights(control), strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)
    assert optimizer.diagnostics().step == 11
    assert optimizer._step_supports_amp_scaling == (implementation in FUSED)


# ---------------------------------------------------------------------- changed from outside


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_outside_change_warns_once_and_moves_the_average_too(implementation):
    model, optimizer = model_and_optimizer(**STRONG, **IMPLEMENTATIONS[implementation])
    train(model, optimizer, 6)
    offset = optimizer.state[model[2].bias]["offset"].clone()
    with torch.no_grad():
        model[2].bias.add_(5.0)
    assert torch.equal(optimizer.state[model[2].bias]["offset"], offset)
    warning = r"2\.bias was changed between two steps .*\. The average moved by the same amount;"
    with pytest.warns(UserWarning, match=warning):
        train(model, optimizer, 1, start=6)
    with torch.no_grad():
        model[2].bias.add_(5.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 1, start=7)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_our_own_writes_are_not_noticed(implementation):
    model, optimizer = model_and_optimizer(**STRONG, **IMPLEMENTATIONS[implementation])
    for step in range(9):
        train(model, optimizer, 1, start=step)
        with optimizer.evaluating():
            pass
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    train(model, optimizer, 2, start=9)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_reset_average_starts_at_the_weights(implementation):
    model, optimizer = model_and_optimizer(**STRONG, **IMPLEMENTATIONS[implementation])
    train(model, optimizer, 10)
    optimizer.reset_average()
    assert optimizer.diagnostics().distance == 0.0
    assert equal(optimizer.average_params().values(), weights(model))
    before = weights(model)
    train(model, optimizer, 1, start=10)
    expected = [w + 0.99 * (v - w) for w, v in zip(weights(model), before, strict=True)]
    for v, wanted in zip(optimizer.average_params().values(), expected, strict=True):
        assert torch.allclose(v, wanted, rtol=1e-12)


# ---------------------------------------------------------------------- changes on the way


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_group_added_during_training_keeps_the_distance(implementation):
    """Sums that a kernel had pending count; all implementations continue the same way."""

    def run(**flags):
        model, optimizer = model_and_optimizer(named=False, **STRONG, **flags)
        train(model, optimizer, 6)
        late = nn.Parameter(torch.ones(4, dtype=torch.float64))
        optimizer.add_param_group({"params": [late], "lr": 0.01})
        for step in range(6, 9):
            late.grad = torch.full_like(late, 0.1)
            train_with(model, optimizer, late, step)
        return [*weights(model), late.detach()], optimizer.diagnostics().distance

    def train_with(model, optimizer, late, step):
        x = torch.randn(16, 5, generator=torch.Generator().manual_seed(step)).double()
        for p in model.parameters():
            p.grad = None
        model(x).square().mean().backward()
        optimizer.step()

    found, distance = run(**IMPLEMENTATIONS[implementation])
    expected, right = run(foreach=False)
    assert distance == pytest.approx(right, rel=1e-12)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_forces_switched_off_and_on(implementation):
    model, optimizer = model_and_optimizer(**STRONG, **IMPLEMENTATIONS[implementation])
    train(model, optimizer, 6)
    assert optimizer.diagnostics().distance > 0
    optimizer.param_groups[0].update(cubic=0.0, repulsive=0.0)
    train(model, optimizer, 1, start=6)
    assert optimizer.diagnostics().distance == 0
    assert all("offset" not in state for state in optimizer.state.values())
    optimizer.param_groups[0].update(**STRONG)
    before = weights(model)
    train(model, optimizer, 2, start=7)  # t = 5 resets, t = 6 iterates
    moved = sum((a - b).square().sum() for a, b in zip(weights(model), before, strict=True))
    assert optimizer.diagnostics().distance == pytest.approx(0.99 * float(moved) ** 0.5, rel=1e-9)


# ---------------------------------------------------------------------- threads


@needs_numba
def test_two_threads_step_two_optimizers():
    runs = [model_and_optimizer(**STRONG, fused=True) for _ in range(3)]
    train(*runs[2], 40)
    threads = [threading.Thread(target=train, args=(*run, 40)) for run in runs[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal(weights(runs[0][0]), weights(runs[2][0]))
    assert equal(weights(runs[1][0]), weights(runs[2][0]))
