"""The Triton kernel against the oracle; what a step must leave alone; that bits repeat."""

import copy

import pytest
import torch

pytest.importorskip("triton", minversion="3.3")

from neumann.optim.phases import Timetable
from tests.support.oracle_runs import Run, finished_oracle
from tests.support.triton_runs import (
    STRONG,
    Stepping,
    device,
    group_of,
    make_backend,
    same,
    scalar,
    shared_of,
    take_step,
)

TWO = [
    {"sizes": (3,), "lr": 0.1, "weight_decay": 0.05},
    {"sizes": (40,), "lr": 0.03, "momentum": 0.6},  # more than a block
]
SHORT = {"steps": 16, "warmup": 2, "interval": 3}

SHORT_RUNS = {
    "both decays": Run(
        [TWO[0], {**TWO[1], "weight_decay": 0.1, "decoupled_weight_decay": True}],
        options=STRONG,
        **SHORT,
    ),
    "maximize": Run(
        [{"sizes": (5, 40), "lr": 0.1}],
        scale=-1.0,
        options={**STRONG, "maximize": True, "weight_decay": 0.1},
        **SHORT,
    ),
    "gradients missing": Run(
        TWO, missing=lambda step, g, i: (step + g) % 3 == 0, options=STRONG, **SHORT
    ),
    "one gradient never": Run(TWO, missing=lambda step, g, i: g == 1, options=STRONG, **SHORT),
    "unbounded": Run(TWO, options={**STRONG, "bounded": False}, **SHORT),
    "bound in force": Run(TWO, options={"cubic": 0.0, "repulsive": 5.0}, **SHORT),
    "cubic alone": Run(TWO, options={"cubic": 0.2, "repulsive": 0.0}, **SHORT),
    "no average": Run(TWO, options={**STRONG, "average": 0.0}, **SHORT),
    "no momentum": Run(
        TWO, missing=lambda step, g, i: step > 9, options={**STRONG, "momentum": 0.0}, **SHORT
    ),
    "growth one": Run(TWO, options={**STRONG, "reset_growth": 1.0}, **SHORT),
    "growth fractional": Run(TWO, options={**STRONG, "reset_growth": 1.5}, **SHORT),
    "one reset": Run(TWO, options=STRONG, steps=20, warmup=4, interval=0),
    "no warm-up": Run(TWO, options=STRONG, steps=12, warmup=0, interval=2),
    "lr zero for a while": Run(
        TWO, schedule=lambda step: float(not 8 <= step < 12), options=STRONG, **SHORT
    ),
    "an empty group": Run(
        [{"sizes": (), "lr": 0.3}, {"sizes": (5,), "lr": 0.1}], options=STRONG, **SHORT
    ),
    "more groups than a chunk": Run(
        [{"sizes": (2,), "lr": 0.02 * (i % 7)} for i in range(35)],
        options=STRONG,
        steps=4,
        warmup=0,
        interval=1,
    ),
}


@pytest.mark.parametrize(
    ("dtype", "steps", "tolerance"), [(torch.float64, 120, 1e-12), (torch.float32, 70, 2e-6)]
)
def test_oracle_over_many_steps(dtype, steps, tolerance):
    run = Run([{"sizes": (3, 35), "lr": 0.1}], steps=steps, options=STRONG)
    assert Stepping(run, dtype).finish().deviation(finished_oracle(run)) <= tolerance


@pytest.mark.parametrize("name", SHORT_RUNS)
def test_oracle(name):
    run = SHORT_RUNS[name]
    timetable = Timetable(run.warmup, run.interval, run.options.get("reset_growth", 2.0))
    resets = [t for t in range(1, run.steps - run.warmup + 1) if timetable.next_reset(t) == t]
    assert len(resets) >= (3 if run.interval else 1)
    assert Stepping(run).finish().deviation(finished_oracle(run)) <= 1e-12


def test_oracle_without_forces():
    """δ does not exist, and r² is neither read nor written."""
    run = Run(TWO, options={"cubic": 0.0, "repulsive": 0.0}, **SHORT)
    stepping = Stepping(run)
    stepping.squared.fill_(7.0)
    assert stepping.finish().deviation(finished_oracle(run)) <= 1e-12
    assert float(stepping.squared) == 7.0


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_oracle_at_a_size_of_many_blocks(dtype, tolerance):
    options = {"cubic": 1e-3, "repulsive": 1e2}
    run = Run([{"sizes": (70_000,), "lr": 0.1}], steps=12, warmup=3, interval=2, options=options)
    stepping = Stepping(run, dtype, block=16384).finish()
    assert stepping.deviation(finished_oracle(run)) <= tolerance


def test_distance_squared_is_the_norm_of_the_offsets():
    run = Run([{"sizes": (3, 40, 100), "lr": 0.1}], options=STRONG, steps=9, warmup=2, interval=3)
    stepping = Stepping(run).finish()
    stepping.backend.finish_distance(stepping.squared)
    exact = finished_oracle(run).distance() ** 2
    assert float(stepping.squared) == pytest.approx(float(exact), rel=1e-13)


# ---------------------------------------------------------------------- the clock


@pytest.mark.parametrize(
    ("interval", "growth", "times"),
    [
        (0, 2.0, (1, 2, 3, 10**15)),
        (7, 1.0, (1, 7, 8, 9, 7 * 10**12 + 1, 7 * 10**12 + 2)),
        (3, 2.0, (1, 3, 4, 10, 22, 23, 3 * 2**50 - 2, 3 * 2**50 - 3)),
        (1, 1.01, (1, 2, 3, 60, 2000, 2001, 10**9)),  # a table longer than one scan
    ],
)
def test_phase_at_any_time(interval, growth, times):
    """At a reset m is −ηg and w stays; anywhere else both are something else."""
    timetable = Timetable(5, interval, growth)
    weight, gradient = torch.ones(4, device=device()), torch.ones(4, device=device())
    backend, clock, squared = make_backend(), scalar(dtype=torch.int64), scalar()
    group = group_of([weight], [gradient], lr=0.5)
    ends = [t for t in times if t > 2000]
    times = [*times, *(timetable.next_reset(t) or t for t in ends)]
    for t in times:
        weight.fill_(1.0)
        group.iterates[0].fill_(1.0)
        clock.fill_(5 + t - 1)
        take_step(backend, [group], shared_of(timetable), clock, squared)
        resets = bool((group.iterates[0] == -0.5).all()) and bool((weight == 1).all())
        assert resets == (timetable.next_reset(t) == t)
        assert int(clock) == 5 + t
        assert float(group.momentum) == min(0.9, 1 - 1 / (1 + t))


# ---------------------------------------------------------------------- what must not happen


def test_a_step_with_an_overflow_changes_nothing():
    run = Run(TWO, options=STRONG, steps=10, warmup=2, interval=3)
    ours, exact = Stepping(run), Stepping(run)
    infinite, fine = scalar(1.0, torch.float32), scalar(0.0, torch.float32)
    for step in range(run.steps):
        exact.advance(step)
        # With sums pending and with none.
        before = ours.tensors(finish=step % 2 == 0)
        ours.advance(step + 100, found_inf=infinite)
        assert same(ours.tensors(finish=False), before)
        ours.advance(step, found_inf=fine)
    assert same(ours.tensors(), exact.tensors())
    assert int(ours.clock) == run.steps


def test_overflow_in_the_first_step_leaves_the_given_distance():
    """No sums are pending then, and none may be made up."""
    run = Run(TWO, options=STRONG, steps=1)
    stepping = Stepping(run)
    stepping.squared.fill_(2.0)
    stepping.advance(0, found_inf=scalar(1.0, torch.float32))
    stepping.backend.finish_distance(stepping.squared)
    assert float(stepping.squared) == 2.0


def test_gradients_are_divided_by_the_scale():
    run = Run(TWO, options=STRONG, steps=9, warmup=2, interval=3)
    ours, exact = Stepping(run), Stepping(run).finish()
    for step in range(run.steps):
        ours.advance(step, scale=1024.0, grad_scale=scalar(1024.0, torch.float32))
    assert same(ours.tensors(), exact.tensors())


def test_reset_forgets_a_nan_and_ignores_an_infinite_gradient():
    weight = torch.full((40,), 3.0, device=device())
    gradient = torch.full_like(weight, torch.inf)
    gradient[0] = 2.0
    group = group_of([weight], [gradient], lr=0.5, weight_decay=0.1)
    group.iterates[0].fill_(torch.nan)
    resting = group_of([torch.ones(40, device=device())], [None])
    resting.iterates[0].fill_(torch.nan)
    backend = make_backend()
    take_step(backend, [group, resting], shared_of(), scalar(dtype=torch.int64), scalar())
    assert bool((weight == 3.0).all())
    assert float(group.iterates[0][0]) == pytest.approx(-0.5 * 2.3)
    assert bool((group.iterates[0][1:] == -torch.inf).all())
    assert bool((group.offsets[0] == 0).all())
    assert bool((resting.iterates[0] == 0).all())


def test_a_parameter_without_gradient_is_left_alone_but_counts():
    weights = [torch.ones(40, device=device(), dtype=torch.float64) for _ in range(2)]
    group = group_of(weights, [torch.ones_like(weights[0]), None], lr=0.0, weight_decay=0.1)
    for tensors in (group.iterates, group.offsets):
        for tensor in tensors:
            tensor.fill_(2.0)
    squared = scalar(1.0)
    backend = make_backend()
    take_step(backend, [group], shared_of(average=0.5), scalar(20, torch.int64), squared)
    backend.finish_distance(squared)
    for tensor, value in ((weights[1], 1.0), (group.iterates[1], 2.0), (group.offsets[1], 2.0)):
        assert bool((tensor == value).all())
    moved = group.offsets[0]
    assert not bool((moved == 2.0).any())
    assert float(squared) == pytest.approx(float(moved.square().sum()) + 40 * 4.0, rel=1e-14)


# ---------------------------------------------------------------------- learning rates as tensors


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tensor_learning_rate_changes_between_steps(dtype):
    """One tensor, written in place, beside floats of the same values."""
    run = Run(
        [{"sizes": (5, 40), "lr": 0.125}],
        options=STRONG,
        steps=9,
        warmup=2,
        interval=3,
        schedule=lambda step: 1 / (1 + step % 4),
    )
    rate = scalar(dtype=dtype)
    ours = Stepping(run, lr=rate.fill_).finish()
    exact = Stepping(run, lr=lambda value: float(torch.tensor(value, dtype=dtype))).finish()
    assert same(ours.tensors(), exact.tensors())


# ---------------------------------------------------------------------- bits


def test_same_run_same_bits_and_settling_changes_none():
    run = Run(TWO, options=STRONG, steps=10, warmup=2, interval=3)
    once, settled = Stepping(run, torch.float32), Stepping(run, torch.float32)
    for step in range(run.steps):
        once.advance(step)
        settled.advance(step)
        settled.backend.finish_distance(settled.squared)
        settled.backend.finish_distance(settled.squared)  # nothing is pending any more
    assert same(once.tensors(), settled.tensors())


def test_settled_state_continues_elsewhere_with_the_same_bits():
    """As after a checkpoint: new tensors, a new backend, the distance as saved."""
    run = Run(TWO, options=STRONG, steps=10, warmup=2, interval=3)
    straight, resumed = Stepping(run), Stepping(run)
    for step in range(run.steps):
        straight.advance(step)
        if step == 6:
            resumed.backend.finish_distance(resumed.squared)
            saved = copy.deepcopy((resumed.groups, resumed.squared, resumed.clock))
            resumed.backend = copy.deepcopy(resumed.backend)
            resumed.groups, resumed.squared, resumed.clock = saved
        resumed.advance(step)
    assert same(straight.tensors(), resumed.tensors())


def test_after_forgetting_the_given_distance_counts():
    run = Run([{"sizes": (5,), "lr": 0.1}], options=STRONG, warmup=0, interval=0)
    kept, forgot = Stepping(run), Stepping(run)
    for stepping in (kept, forgot):
        for step in range(3):
            stepping.advance(step)
        stepping.squared.fill_(100.0)
    forgot.backend.forget()
    for stepping in (kept, forgot):
        stepping.advance(3)
    assert float(forgot.squared) == 100.0
    assert float(kept.squared) < 100.0
    assert not same(kept.groups[0].weights, forgot.groups[0].weights)


def test_a_settled_distance_may_be_replaced():
    """As where other devices add their share."""
    run = Run([{"sizes": (5,), "lr": 0.1}], options=STRONG, warmup=0, interval=0)
    stepping = Stepping(run)
    stepping.advance(0)
    stepping.backend.finish_distance(stepping.squared)
    stepping.squared.fill_(100.0)
    stepping.advance(1)
    assert float(stepping.squared) == 100.0


def test_tensors_may_move_and_join_between_steps():
    """The sums of the step before still count, and the bits are those of a run at rest."""
    run = Run(
        [{"sizes": (5, 40), "lr": 0.1}],
        missing=lambda step, g, i: i == 2,
        options=STRONG,
        steps=8,
        warmup=1,
        interval=0,
    )
    still, moving = Stepping(run), Stepping(run)
    for step in range(run.steps):
        still.advance(step)
        group = moving.groups[0]
        if step == 3:
            group.weights[0].data = group.weights[0].clone()
        if step == 5:
            group.offsets = [offset.clone() for offset in group.offsets]
        if step == 6:
            joining = torch.ones(3, dtype=torch.float64, device=device())
            for tensors in (group.weights, group.iterates, group.offsets):
                tensors.append(joining.clone() if tensors is group.weights else joining * 0)
        moving.advance(step)
    group = moving.groups[0]
    for tensors in (group.weights, group.iterates, group.offsets):
        tensors.pop()
    assert same(still.tensors(), moving.tensors())


def test_gradients_may_change_their_dtype():
    results = []
    for dtypes in ((torch.float32, torch.float32), (torch.float32, torch.bfloat16)):
        group = group_of([torch.ones(40, device=device())], [])
        backend, clock, squared = make_backend(), scalar(5, torch.int64), scalar()
        for dtype in dtypes:
            group.gradients = [torch.full((40,), 0.5, dtype=dtype, device=device())]
            take_step(backend, [group], shared_of(), clock, squared)
        results.append([*group.weights, *group.iterates, *group.offsets, squared])
    assert same(*results)


def test_a_shorter_view_at_the_same_address_is_another_tensor():
    tensors = [torch.ones(40, device=device()) for _ in range(4)]
    backend, clock, squared = make_backend(), scalar(5, torch.int64), scalar()
    for size in (40, 3):
        w, g, m, d = (tensor[:size] for tensor in tensors)
        group = group_of([w], [g], iterates=[m], offsets=[d])
        before = [tensor[size:].clone() for tensor in tensors]
        take_step(backend, [group], shared_of(), clock, squared)
    assert same([tensor[size:] for tensor in tensors], before)
