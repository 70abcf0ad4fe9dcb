"""The schedules against their closed forms, and the contract of torch's schedulers."""

import io
import math
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from neumann import Neumann
from neumann.optim.lr_rules import SCHEDULE_NAMES
from neumann.optim.schedules import (
    CosineDecay,
    InverseTime,
    LinearDecay,
    LinearScaling,
    PowerDecay,
    StepDecay,
    lr_factor,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:the learning rate has been 0 since step"),  # on purpose
    pytest.mark.filterwarnings("ignore:the loaded schedule has"),
]

Build = Callable[[torch.optim.Optimizer], LRScheduler]

BUILDS: dict[str, Build] = {
    "scaling": lambda o: LinearScaling(o, batch_size=4000, base_batch=32, ramp_steps=4),
    "step": lambda o: StepDecay(o, steps_per_epoch=2, every_epochs=3, scale=8.0, ramp_steps=4),
    "inverse": lambda o: InverseTime(o, decay_steps=5.0, scale=8.0, ramp_steps=4),
    "linear": lambda o: LinearDecay(o, total_steps=20, ramp_steps=4),
    "power": lambda o: PowerDecay(o, total_steps=20, power=0.5, ramp_steps=4),
    "cosine": lambda o: CosineDecay(o, total_steps=20, ramp_steps=4, ramp_from="base", scale=8.0),
}


def sgd(*lrs: Any, **group: Any) -> torch.optim.SGD:
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr, **group} for lr in lrs]
    return torch.optim.SGD(groups, lr=0.1)


def advance(optimizer: torch.optim.Optimizer, schedule: LRScheduler, steps: int) -> list[Any]:
    """The learning rate of the first group at each of the next steps."""
    seen = []
    for _ in range(steps):
        seen.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return seen


def test_linear_scaling_ramps_from_the_base_to_the_scaled_rate():
    optimizer = sgd(0.1)
    schedule = LinearScaling(optimizer, batch_size=8192, base_batch=256, ramp_steps=4)
    expected = [0.1, 0.1 * 8.75, 0.1 * 16.5, 0.1 * 24.25, 3.2, 3.2, 3.2]
    assert advance(optimizer, schedule, 7) == pytest.approx(expected, rel=1e-15)


def test_linear_scaling_without_a_ramp_is_scaled_at_once():
    optimizer = sgd(0.1)
    schedule = LinearScaling(optimizer, batch_size=64, base_batch=256)
    assert advance(optimizer, schedule, 3) == pytest.approx([0.025] * 3, rel=1e-15)


def test_the_step_decay_of_the_paper():
    """5 epochs of ramp, then ×0.3 every 40 epochs, at 3 steps an epoch."""
    optimizer = sgd(0.045)
    schedule = StepDecay(optimizer, steps_per_epoch=3, scale=10.0, ramp_steps=15)
    rates = advance(optimizer, schedule, 3 * 130)
    assert rates[0] == pytest.approx(0.045, rel=1e-15)
    assert rates[5] == pytest.approx(0.045 * 4, rel=1e-15)
    for epoch, expected in [(5, 0.45), (45, 0.45 * 0.3), (85, 0.45 * 0.09), (125, 0.45 * 0.027)]:
        assert rates[3 * epoch] == pytest.approx(expected, rel=1e-14)
        if epoch > 5:
            assert rates[3 * epoch - 1] == pytest.approx(expected / 0.3, rel=1e-14)


def test_step_decay_without_a_ramp():
    optimizer = sgd(1.0)
    schedule = StepDecay(optimizer, steps_per_epoch=1, factor=0.5, every_epochs=2)
    assert advance(optimizer, schedule, 6) == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


def test_inverse_time_halves_at_decay_steps():
    optimizer = sgd(0.6)
    schedule = InverseTime(optimizer, decay_steps=10)
    rates = advance(optimizer, schedule, 1001)
    assert rates == pytest.approx([0.6 / (1 + t / 10) for t in range(1001)], rel=1e-15)
    assert rates[10] == pytest.approx(0.3, rel=1e-15)


def test_inverse_time_starts_its_clock_at_the_end_of_the_ramp():
    optimizer = sgd(0.5)
    schedule = InverseTime(optimizer, decay_steps=2, scale=3.0, ramp_steps=2)
    expected = [0.5, 1.0, 1.5, 1.5 / 1.5, 1.5 / 2.0, 1.5 / 2.5]
    assert advance(optimizer, schedule, 6) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_groups_keep_their_ratio(build):
    optimizer = sgd(0.1, 0.7)
    schedule = build(optimizer)
    for _ in range(15):
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert second == pytest.approx(7 * first, rel=1e-14)
        assert schedule.get_last_lr() == [first, second]
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
def test_a_group_added_later_follows_the_schedule(build, tensor):
    """Its learning rate is the peak, as it was for the others, and a resumed run has the same."""
    make_rate = torch.tensor if tensor else float
    optimizer = sgd(make_rate(0.1))
    schedule = build(optimizer)
    for step in range(12):
        if step == 3:
            late = {"params": [torch.nn.Parameter(torch.ones(1))], "lr": make_rate(0.7)}
            optimizer.add_param_group(late)
        if step == 8:
            saved = schedule.state_dict()
            schedule = build(optimizer)
            schedule.load_state_dict(saved)
        optimizer.step()
        schedule.step()
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        if step >= 3:
            assert rates[1] == pytest.approx(7 * rates[0], rel=1e-6)


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_a_tensor_learning_rate_is_changed_in_place(build):
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer, plain = sgd(rate), sgd(0.1)
    held = optimizer.param_groups[0]["lr"]
    rates = advance(optimizer, build(optimizer), 15)
    assert rates == pytest.approx(advance(plain, build(plain), 15), rel=1e-14)
    assert optimizer.param_groups[0]["lr"] is held


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("stop", [2, 4, 9])
def test_a_resumed_run_has_the_same_learning_rates(build, tensor, stop):
    def fresh() -> torch.optim.SGD:
        return sgd(torch.tensor(0.1) if tensor else 0.1)

    whole = fresh()
    expected = advance(whole, build(whole), 30)[stop:]

    stopped = fresh()
    schedule = build(stopped)
    advance(stopped, schedule, stop)
    file = io.BytesIO()
    torch.save({"optimizer": stopped.state_dict(), "schedule": schedule.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    resumed = fresh()
    schedule = build(resumed)
    resumed.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    assert advance(resumed, schedule, 30 - stop) == expected


def test_the_settings_travel_with_the_state():
    source = sgd(1.0)
    saved = StepDecay(source, steps_per_epoch=2, factor=0.5, every_epochs=1).state_dict()
    target = sgd(1.0)
    schedule = StepDecay(target, steps_per_epoch=7)
    schedule.load_state_dict(saved)
    assert advance(target, schedule, 4) == [1.0, 1.0, 0.5, 0.5]


def test_a_schedule_can_be_built_in_the_middle_of_a_run():
    optimizer = sgd(0.1, initial_lr=0.1)
    schedule = LinearScaling(optimizer, batch_size=5, base_batch=1, ramp_steps=4, last_epoch=1)
    assert advance(optimizer, schedule, 3) == pytest.approx([0.3, 0.4, 0.5], rel=1e-15)


@pytest.mark.parametrize("total_steps", [199, 50, 100])
@pytest.mark.parametrize(
    "build",
    [
        lambda o, n: LinearScaling(o, batch_size=2, base_batch=1, total_steps=n),
        lambda o, n: StepDecay(o, steps_per_epoch=1, total_steps=n),
        lambda o, n: InverseTime(o, decay_steps=1, total_steps=n),
        lambda o, n: LinearDecay(o, total_steps=n),
        lambda o, n: CosineDecay(o, total_steps=n),
    ],
    ids=["scaling", "step", "inverse", "linear", "cosine"],
)
def test_a_run_that_is_mostly_warm_up_warns(build, total_steps):
    covered = "all" if total_steps <= 100 else "most"
    message = f"of 100 steps covers {covered} of the run's {total_steps}: lower warmup_epochs"
    with pytest.warns(UserWarning, match=message) as caught:
        build(sgd(0.1, warmup_steps=100), total_steps)
    assert [warning.filename for warning in caught] == [__file__]


def test_no_warning_if_nothing_is_wrong():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        InverseTime(sgd(0.1, warmup_steps=100), decay_steps=1, total_steps=200)
        InverseTime(sgd(0.1, warmup_steps=100), decay_steps=1)
        InverseTime(sgd(0.1, warmup_steps=None), decay_steps=1, total_steps=1)
        InverseTime(sgd(0.1), decay_steps=1, total_steps=1)


SCALING = (LinearScaling, {"batch_size": 64, "base_batch": 32})
STEP = (StepDecay, {"steps_per_epoch": 10})
INVERSE = (InverseTime, {"decay_steps": 10})
COSINE = (CosineDecay, {"total_steps": 10})


@pytest.mark.parametrize(
    ("schedule", "name", "value"),
    [
        (SCALING, "batch_size", 0),
        (SCALING, "base_batch", 32.0),
        (SCALING, "ramp_steps", -1),
        (SCALING, "ramp_steps", True),
        (SCALING, "total_steps", 0),
        (STEP, "steps_per_epoch", 0),
        (STEP, "every_epochs", 0.5),
        (STEP, "factor", 0.0),
        (STEP, "factor", math.nan),
        (STEP, "scale", -2.0),
        (INVERSE, "decay_steps", 0),
        (INVERSE, "decay_steps", math.inf),
        (INVERSE, "scale", math.nan),
        (INVERSE, "ramp_from", "one"),
        (COSINE, "total_steps", 0),
        (COSINE, "total_steps", None),
    ],
)
def test_bad_arguments_are_named_and_leave_the_optimizer_alone(schedule, name, value):
    kind, arguments = schedule
    optimizer = sgd(0.1)
    before = dict(optimizer.param_groups[0])
    with pytest.raises(ValueError, match=f"{name} must .*got {value!r}"):
        kind(optimizer, **{**arguments, name: value})
    assert optimizer.param_groups[0] == before


@pytest.mark.parametrize("schedule", [STEP, INVERSE, COSINE], ids=["step", "inverse", "cosine"])
def test_a_ramp_from_the_base_rate_needs_its_end(schedule):
    kind, arguments = schedule
    with pytest.raises(ValueError, match="ramp_steps=5 needs scale"):
        kind(sgd(0.1), **arguments, ramp_steps=5, ramp_from="base")


# ---------------------------------------------------------------------- by name, as functions

TOTAL, RAMP, EPOCH = 1400, 100, 10


def at(schedule: str, step: int, ramp: int = RAMP) -> float:
    return lr_factor(schedule, step, total_steps=TOTAL, ramp_steps=ramp, steps_per_epoch=EPOCH)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_every_named_schedule_ramps_from_zero_to_the_peak(schedule):
    assert [at(schedule, step) for step in (0, 49, 99)] == [0.01, 0.5, 1.0]
    assert at(schedule, RAMP) == 1.0
    assert at(schedule, 0, ramp=0) == 1.0


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_no_named_schedule_rises_after_the_ramp_or_becomes_negative(schedule):
    factors = [at(schedule, step) for step in range(RAMP, TOTAL + 10)]
    assert all(a >= b for a, b in pairwise(factors))
    assert min(factors) >= 0


def test_the_formulas_of_the_named_schedules():
    middle = (RAMP + TOTAL) // 2
    assert at("constant", middle) == 1.0
    assert at("linear", middle) == 0.5
    assert at("power", middle) == 0.5**0.7
    assert at("power", TOTAL) == 0
    assert at("cosine", middle) == pytest.approx(0.5)
    assert at("cosine", RAMP + 325) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert at("linear", TOTAL) == 0
    assert [at("step", RAMP + s) for s in (399, 400, 800)] == [1.0, 0.3, pytest.approx(0.09)]
    assert at("inverse", RAMP + EPOCH) == 0.5


def test_rescaled_drops_three_times_at_sevenths_of_the_run():
    drops = [s for s in range(1, TOTAL) if at("rescaled", s, 0) < at("rescaled", s - 1, 0)]
    assert drops == [TOTAL * 2 // 7, TOTAL * 4 // 7, TOTAL * 6 // 7]
    assert at("rescaled", TOTAL - 1) == pytest.approx(0.3**3)


def test_an_unknown_schedule():
    with pytest.raises(ValueError, match=r"schedule must be one of .*cosine.*; got 'cos'"):
        at("cos", 0)


@pytest.mark.parametrize(
    ("schedule", "build"),
    [
        ("constant", lambda o, z: LinearScaling(o, batch_size=1, base_batch=1, **z)),
        ("linear", lambda o, z: LinearDecay(o, total_steps=TOTAL, **z)),
        ("power", lambda o, z: PowerDecay(o, total_steps=TOTAL, **z)),
        ("cosine", lambda o, z: CosineDecay(o, total_steps=TOTAL, **z)),
        ("step", lambda o, z: StepDecay(o, steps_per_epoch=EPOCH, **z)),
        ("inverse", lambda o, z: InverseTime(o, decay_steps=EPOCH, **z)),
    ],
)
def test_a_scheduler_has_the_bits_of_the_named_schedule(schedule, build):
    optimizer = sgd(0.3)
    scheduler = build(optimizer, {"ramp_steps": RAMP, "ramp_from": "zero"})
    rates = advance(optimizer, scheduler, TOTAL + 10)
    assert rates == [0.3 * at(schedule, step) for step in range(TOTAL + 10)]


def test_a_falling_schedule_can_ramp_from_the_base_rate():
    optimizer = sgd(0.1)
    scheduler = LinearDecay(optimizer, total_steps=8, ramp_steps=4, ramp_from="base", scale=5.0)
    expected = [0.1, 0.2, 0.3, 0.4, 0.5, 0.375, 0.25, 0.125, 0.0]
    assert advance(optimizer, scheduler, 9) == pytest.approx(expected)


def test_a_cycled_momentum_is_warned_about():
    optimizer = Neumann([torch.nn.Parameter(torch.ones(2, 3))], 0.1, precondition="spectral")
    weight = optimizer.param_groups[0]["params"][0]
    OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    weight.grad = torch.ones(2, 3)
    with pytest.warns(UserWarning, match="pass cycle_momentum=False to OneCycleLR"):
        optimizer.step()
    optimizer.step()  # says it once
    late = Neumann([weight], 0.1, precondition="spectral")
    late.step()
    OneCycleLR(late, max_lr=0.1, total_steps=10)
    with pytest.warns(UserWarning, match="pass cycle_momentum=False to OneCycleLR"):
        late.step()
    quiet = Neumann([torch.nn.Parameter(torch.ones(2, 3))], 0.1, precondition="spectral")
    OneCycleLR(quiet, max_lr=0.1, total_steps=10, cycle_momentum=False)
    quiet.param_groups[0]["params"][0].grad = torch.ones(2, 3)
    quiet.step()
    assert quiet.param_groups[0]["momentum"] == 0.6
