"""What comes between compiled steps, eager ones and evaluation, and what cannot be compiled."""

import copy

import pytest
import torch

from tests.support import oracle_runs
from tests.support.compiled import (
    MARKS,
    Compiled,
    check,
    difference,
    go,
    make,
    parameters,
    refused,
    whole,
)
from tests.support.oracle_runs import FUSED

pytestmark = MARKS


@pytest.mark.parametrize("implementation", ["foreach", *FUSED])
def test_eager_and_compiled_steps_take_turns(implementation):
    """Sums that a kernel had pending count, and the graph's own writes cause no warning."""
    ours = make(**oracle_runs.IMPLEMENTATIONS[implementation] | {"fused": implementation in FUSED})
    reference = make()
    compiled = Compiled(ours.step)
    start = 0
    for steps, step in ((5, ours.step), (4, compiled), (3, ours.step), (2, compiled)):
        go(ours, step, steps, start)
        start += steps
    assert ours.diagnostics().as_dict()["distance"] > 0
    with ours.evaluating():
        pass
    go(ours, ours.step, 1, start)
    go(reference, reference.step, start + 1)
    ours.state_dict()  # finishes the distance
    assert whole(compiled)
    assert difference(ours, reference) < 1e-13


def test_a_state_dict_between_compiled_steps():
    ours = make()
    compiled = Compiled(ours.step)
    go(ours, compiled, 6)
    saved = copy.deepcopy(ours.state_dict())
    kept = [p.detach().clone() for p in parameters(ours)]
    go(ours, compiled, 6, 6)
    after = [p.detach().clone() for p in parameters(ours)]
    with torch.no_grad():
        for p, w in zip(parameters(ours), kept, strict=True):
            p.copy_(w)
    ours.load_state_dict(saved)
    go(ours, compiled, 6, 6)
    assert all(map(torch.equal, after, parameters(ours)))
    assert ours.diagnostics().step == 12


def test_evaluation_between_compiled_steps():
    ours, reference = make(), make()
    compiled = Compiled(ours.step)
    go(ours, compiled, 8)
    go(reference, reference.step, 8)
    pairs = zip(ours.eval_params(), reference.eval_params(), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-13) for a, b in pairs)
    with ours.evaluating():
        pass
    go(ours, compiled, 4, 8)
    go(reference, reference.step, 4, 8)
    assert whole(compiled)
    assert difference(ours, reference) < 1e-13


def test_evaluation_mode_is_refused():
    refused(make().eval(), "evaluation mode would update the wrong weights")


def test_differentiable_is_refused():
    refused(make(fused=None, differentiable=True), "differentiable=True cannot be compiled")


def test_asking_other_processes_is_refused(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        refused(make(skip_nonfinite=True), "asks all processes")
        check(steps=2)
    finally:
        torch.distributed.destroy_process_group()
