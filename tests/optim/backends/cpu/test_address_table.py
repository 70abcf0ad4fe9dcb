"""What the CPU kernel remembers of tensors between steps, and what it tells others of them."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

pytest.importorskip("numba")

from neumann.optim.backends.cpu import numba_pass
from tests.support.cpu_passes import (
    BF16,
    C64,
    COEFFICIENTS,
    F16,
    F32,
    F64,
    FORCE,
    check,
    lists_of,
    run_pass,
    tensors_of,
)


def test_versions_count_what_was_written():
    def versions(tensors):
        return [of[0]._version for of in lists_of(tensors).values()]

    written = {"warm-up": [1, 0, 1], "reset": [0, 1, 0], "iterate": [1, 1, 1]}
    for phase, expected in written.items():
        tensors = tensors_of((5, 9000))
        before = versions(tensors)
        run_pass(tensors, COEFFICIENTS[phase], FORCE)
        after = versions(tensors)
        grown = [int(new > old) for new, old in zip(after, before, strict=True)]
        assert grown == expected, phase


def test_parameters_that_require_gradients():
    for dtype in (F32, F16, C64):
        tensors = tensors_of((5, 9000), dtype)
        parameters = [torch.nn.Parameter(t) for t in tensors.weights]
        check(replace(tensors, weights=parameters), COEFFICIENTS["iterate"])
        assert all(p.is_leaf and p._version > 0 for p in parameters)


@pytest.fixture
def builds(monkeypatch):
    """How often tables were made."""
    made = []
    original = numba_pass._build_tables
    monkeypatch.setattr(
        numba_pass, "_build_tables", lambda *a: made.append(len(a[0])) or original(*a)
    )
    return made


def test_new_gradients_need_no_new_table(builds):
    tensors, runner = tensors_of((5, 9000)), numba_pass.Pass()
    for _ in range(3):
        fresh = replace(tensors, gradients=[torch.randn_like(w) for w in tensors.weights])
        check(fresh, COEFFICIENTS["iterate"], runner=runner)
    assert builds == [2]


def test_changes_are_noticed(builds):
    tensors, runner = tensors_of([(4, 4), (30, 30)]), numba_pass.Pass()

    def step(tensors):
        builds.clear()
        check(tensors, COEFFICIENTS["iterate"], runner=runner)
        assert builds, "a change went unnoticed"
        check(tensors, COEFFICIENTS["iterate"], runner=runner)

    step(tensors)
    tensors.gradients[0] = torch.randn(4, 4).t()
    step(tensors)
    tensors.gradients[0] = torch.randn(4, 4, dtype=F64)
    step(tensors)
    tensors.weights[0].data = torch.randn(4, 4)
    step(tensors)
    tensors.weights[0] = tensors.weights[0].t()  # lies where the old one lay
    step(tensors)
    tensors.weights[1].data = tensors.weights[1].data[:10, :]
    tensors.gradients[1] = tensors.gradients[1][:10]
    tensors.iterates[1], tensors.offsets[1] = torch.randn(10, 30), torch.randn(10, 30)
    step(tensors)
    tensors.iterates[0] = torch.randn(4, 4, dtype=BF16)
    step(tensors)
    step(tensors.select([False, True]))
    step(tensors)
    step(replace(tensors, offsets=None))


def test_a_negated_gradient_is_noticed():
    tensors, runner = tensors_of([()]), numba_pass.Pass()
    check(tensors, COEFFICIENTS["iterate"], runner=runner)
    tensors.gradients[0] = torch.tensor(1 + 2j).conj().imag  # no stride gives it away
    check(tensors, COEFFICIENTS["iterate"], runner=runner)


def test_gradients_are_not_kept_alive():
    tensors, runner = tensors_of((9000,)), numba_pass.Pass()
    run_pass(tensors, COEFFICIENTS["iterate"], FORCE, runner=runner)
    gradient = weakref.ref(tensors.gradients.pop())
    gc.collect()
    assert gradient() is None


def test_other_devices_are_refused():
    tensors = tensors_of((3,))
    elsewhere = replace(tensors, gradients=[torch.empty(3, device="meta")])
    with pytest.raises(ValueError, match="on meta"):
        run_pass(elsewhere, COEFFICIENTS["iterate"], 0.0)
