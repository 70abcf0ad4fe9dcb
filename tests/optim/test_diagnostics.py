"""diagnostics() against the oracle, and that nothing is read before it is asked for."""

import pytest
import torch

from tests.support.oracle_runs import Run, advance, advance_oracle, optimizer_of, oracle_of


def test_against_the_oracle():
    run = Run(
        [{"sizes": (3, 7), "lr": 0.1}, {"sizes": (5,), "lr": 0.02, "momentum": 0.5}],
        steps=40,
        warmup=4,
        interval=6,
        options={"cubic": 0.03, "repulsive": 0.02},
    )
    optimizer, oracle = optimizer_of(run, torch.float64), oracle_of(run)
    assert optimizer.diagnostics().phase == "warm-up"
    assert optimizer.diagnostics().steps_to_reset == 5
    seen = []
    for step in range(run.steps):
        oracle_reset = oracle.next_reset + run.warmup
        advance(run, optimizer, step)
        advance_oracle(run, oracle, step)
        found = optimizer.diagnostics()
        seen.append(found.phase)
        assert found.step == step + 1
        assert found.t == max(0, step + 1 - run.warmup)
        assert (found.phase == "reset") == (step + 1 == oracle_reset)
        assert found.steps_to_reset == oracle.next_reset + run.warmup - (step + 1)
        r = oracle.distance()
        assert found.distance == pytest.approx(float(r))
        for group, exact in zip(found.groups, oracle.groups, strict=True):
            assert group.lr == exact.lr
            assert group.momentum == pytest.approx(float(exact.mu))
            assert group.cubic_force == pytest.approx(float(0.03 * r**2))
            total = float(oracle._force(r, exact.lr, exact.mu) * r)
            assert group.cubic_force - group.repulsive_force == pytest.approx(total, abs=1e-12)
    assert seen[:6] == ["warm-up"] * 4 + ["reset", "iterate"]


def test_a_snapshot_stays_the_same():
    run = Run([{"sizes": (3,), "lr": 0.1}], warmup=2, interval=0)
    optimizer = optimizer_of(run, torch.float64)
    for step in range(6):
        advance(run, optimizer, step)
    lr = optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    found = optimizer.diagnostics()
    before = found.as_dict()
    advance(run, optimizer, 6)
    lr.fill_(0.2)
    assert found.as_dict() == before
    assert found.steps_to_reset is None


def test_without_forces():
    run = Run([{"sizes": (3,), "lr": 0.1}], options={"cubic": 0.0, "repulsive": 0.0})
    optimizer = optimizer_of(run, torch.float64)
    advance(run, optimizer, 0)
    group = optimizer.diagnostics().groups[0]
    assert (group.cubic_force, group.repulsive_force) == (0.0, 0.0)


def test_diagnostics_are_read_only_on_request(monkeypatch):
    run = Run([{"sizes": (3,), "lr": 0.1}])
    optimizer = optimizer_of(run, torch.float64, lr=torch.tensor(0.1))
    advance(run, optimizer, 0)

    def refuse(*_):
        raise AssertionError("the host waited for the device")

    for name in ("item", "__float__", "__int__", "__bool__", "cpu", "tolist", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    found = optimizer.diagnostics()
    with pytest.raises(AssertionError, match="waited"):
        _ = found.distance
