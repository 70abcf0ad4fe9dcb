"""Mixed precision: autocast, and GradScaler's skipped steps, which advance nothing."""

import pytest
import torch

from neumann import Neumann
from tests.support.oracle_runs import FUSED, IMPLEMENTATIONS
from tests.support.small_training import (
    OPTIONS,
    STEPS,
    batch,
    distance,
    furthest,
    implementation_of,
    loss_of,
    network,
    outcome,
)
from tests.support.small_training import trained as trained_alone

# Of the attempts: in the warm-up, where the first reset was due, where the second was, in between.
OVERFLOWS = (1, 3, 7, 10)


def everything(optimizer):
    """All that a step could move: weights, m, δ, clock, μ, r²."""
    state = optimizer.state_dict()["state"]
    weights = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    return weights + [tensor.clone() for entry in state.values() for tensor in entry.values()]


def attempt_step(optimizer, model, scaler, step, overflow, unscale):
    optimizer.zero_grad()
    scaler.scale(loss_of(model, batch(step))).backward()
    if overflow:
        model[2].weight.grad[0, 0] = float("inf")
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("unscale", [False, True])
def test_a_skipped_step_advances_nothing(implementation, unscale):
    """The run is the one in which the overflown steps were never tried."""
    with implementation_of(implementation) as flags:
        fused = flags.get("fused", False)
        model = network()
        optimizer = Neumann(model.named_parameters(), **OPTIONS, **flags)
        assert optimizer._step_supports_amp_scaling == fused
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        done = 0
        for attempt in range(12):
            before = everything(optimizer)
            attempt_step(optimizer, model, scaler, done, attempt in OVERFLOWS, unscale)
            after = everything(optimizer)
            same = all(map(torch.equal, before, after))
            assert same == (attempt in OVERFLOWS)
            done += attempt not in OVERFLOWS
        assert optimizer.diagnostics().step == done == 8
        assert furthest(outcome(optimizer), outcome(trained_alone(done))) < 1e-12
        assert scaler.get_scale() != 64.0


@pytest.mark.parametrize("implementation", FUSED)
@pytest.mark.parametrize("skip_nonfinite", [False, True])
def test_a_scaled_step_without_gradients_is_taken(implementation, skip_nonfinite):
    """The scaler's flag is the number 0 then."""
    with implementation_of(implementation) as flags:
        parameters = network().parameters()
        optimizer = Neumann(parameters, skip_nonfinite=skip_nonfinite, **OPTIONS, **flags)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(torch.zeros(()))  # which makes it ready
        with pytest.warns(UserWarning, match="found no gradient at all"):
            scaler.step(optimizer)
        assert optimizer.diagnostics().step == 1
        assert optimizer.diagnostics().skipped == 0


def test_autocast():
    """bfloat16 inside the model; weights, state and gradients stay float32."""
    exact = trained_alone(dtype=torch.float32)
    model = network(torch.float32)
    optimizer = Neumann(model.named_parameters(), **OPTIONS)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batch(step, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            predictions = model(x)
        assert predictions.dtype == torch.bfloat16
        loss = (predictions.float().squeeze(1) - x.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert {t.dtype for p in model.parameters() for t in (p, p.grad)} == {torch.float32}
    assert {optimizer.state[p]["iterate"].dtype for p in model.parameters()} == {torch.float32}
    assert 0 < distance(outcome(optimizer), outcome(exact)) < 0.02
    assert sum(losses[-4:]) < sum(losses[:4]) / 2
