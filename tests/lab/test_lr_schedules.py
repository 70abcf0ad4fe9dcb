"""--sched: the library's rules with their parameters, and what is refused."""

import pytest
import torch

from neumann.lab.config import TrainConfig
from neumann.lab.errors import UsageError
from neumann.lab.lr_schedules import Schedule
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process
from neumann.optim.lr_rules import SCHEDULE_NAMES, lr_factor
from neumann.optim.schedules import InverseTime, StepDecay

COUNTS = {"total_steps": 1000, "ramp_steps": 22, "steps_per_epoch": 10}


def rates(text, **changes):
    counts = {**COUNTS, **changes}
    factor = Schedule.parse(text).bind(**counts)
    return [factor(step) for step in range(counts["total_steps"])]


def drops(text, **changes):
    found = rates(text, **changes)
    start = {**COUNTS, **changes}["ramp_steps"] + 1
    return [step for step in range(start, len(found)) if found[step] < found[step - 1]]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_name_alone_has_the_bits_it_always_had(name):
    assert rates(name) == [lr_factor(name, step, **COUNTS) for step in range(1000)]


def test_the_schedule_of_the_paper_drops_five_times_in_a_run_of_any_length():
    assert drops("step:0.3,17.7%") == [22 + 177 * k for k in range(1, 6)]
    assert rates("step:0.3,17.7%")[-1] == pytest.approx(0.3**5)
    # 60 steps: every 10.62 of them, without adding up the rounding.
    assert drops("step:0.3,17.7%", total_steps=60, ramp_steps=1) == [12, 23, 33, 44, 55]


def test_the_schedule_of_the_inception_baselines():
    assert drops("step:0.94,2ep", ramp_steps=0) == list(range(20, 1000, 20))
    assert rates("step:0.94,2ep", ramp_steps=0)[-1] == pytest.approx(0.94**49)
    assert drops("step:0.5") == [422, 822]  # the usual 40 epochs


def test_inverse_time_with_a_length():
    assert rates("inverse:10%", ramp_steps=0)[100] == 0.5
    assert rates("inverse:5ep", ramp_steps=0)[50] == 0.5


def test_a_power():
    assert rates("power:0.5", ramp_steps=0)[750] == 0.5
    assert rates("power:1") == rates("linear")
    assert rates("power") == rates("power:0.7")


def sgd():
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("step:0.3,17.7%", lambda o, ramp: StepDecay(o, period_steps=177.0, **ramp)),
        (
            "step:0.94,2ep",
            lambda o, ramp: StepDecay(o, steps_per_epoch=10, factor=0.94, every_epochs=2, **ramp),
        ),
        ("inverse:10%", lambda o, ramp: InverseTime(o, decay_steps=100.0, **ramp)),
    ],
)
def test_the_schedulers_of_the_library_have_the_same_bits(text, build):
    optimizer = sgd()
    scheduler = build(optimizer, {"ramp_steps": 22, "ramp_from": "zero"})
    found = []
    for _ in range(1000):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert found == rates(text)


def test_a_step_decay_needs_a_distance_of_its_drops():
    with pytest.raises(ValueError, match="needs steps_per_epoch or period_steps"):
        StepDecay(sgd())
    with pytest.raises(ValueError, match=r"period_steps must be .* above 0, got 0"):
        StepDecay(sgd(), period_steps=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cosin", "unknown --sched 'cosin'; did you mean cosine"),
        ("stp:0.3,1ep", "unknown --sched 'stp'; did you mean step"),
        ("linear:3", "--sched linear:3: it should be linear, without parameters"),
        ("step:0.3,1ep,2", "it should be step:FACTOR,LENGTH"),
        ("inverse:0.5,1ep", "it should be inverse:LENGTH"),
        ("step:17.7%", "the factor must be above 0 and at most 1, got '17.7%'"),
        ("step:0,1ep", "the factor must be above 0"),
        ("power:0", "the exponent must be a finite number above 0, as in power:0.7; got '0'"),
        ("power:inf", "the exponent must be a finite number above 0"),
        ("power:2,3", "it should be power:EXPONENT"),
        ("step:", "the factor must be above 0 and at most 1, got ''"),
        ("step:0.3,110%", "the length must be at most 100%"),
        ("step:0.3,0%", "the length must be above 0"),
        ("step:0.3,-1ep", "the length must be a share of the run"),
    ],
)
def test_schedules_that_do_not_exist(text, message):
    with pytest.raises(UsageError, match=message):
        TrainConfig(sched=text).resolve()


def test_a_run_follows_its_ramp_and_drops(tmp_path):
    """20 steps: a ramp of 4, then × 0.5 every 5."""
    config = TrainConfig(
        opt="sgd", lr=1.0, batch_size=256, epochs=4, log_every=1, ramp="20%", sched="step:0.5,25%"
    ).resolve()
    seen = []
    Training(config, Process()).run(tmp_path / "run", seen.append)
    found = [line["lr"] for line in seen if line["kind"] == "step"]
    ramp = [0.25, 0.5, 0.75, 1.0]
    assert found == ramp + [1.0] * 5 + [0.5] * 5 + [0.25] * 5 + [0.125]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ramp": "120%"}, "--ramp must be at most 100%, got 120%"),
        ({"ramp": "-1%"}, "--ramp must be a share of the run"),
        ({"ramp": "21ep"}, r"--ramp must be between 0 and --epochs \(20\), got 21ep"),
        ({"ramp": "2%", "ramp_epochs": 1.0}, "--ramp and --ramp-epochs cannot be combined"),
    ],
)
def test_ramps_that_do_not_fit(settings, message):
    with pytest.raises(UsageError, match=message):
        TrainConfig(**settings).resolve()


def test_a_ramp_of_more_steps_than_the_run_is_refused():
    config = TrainConfig(opt="sgd", epochs=1, ramp="500").resolve()
    with pytest.raises(UsageError, match="--ramp is 500, which is 500 steps; the run has 22"):
        Training(config, Process())
