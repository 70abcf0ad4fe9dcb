"""Parts of a run: shares, epochs and steps, alone and as options of an arm."""

import pytest
from torch import nn

from neumann.lab.errors import UsageError
from neumann.lab.lengths import Length
from neumann.lab.optimizers.arms import Arm, build_optimizer

TOTAL, EPOCH = 1000, 20


def count(text, total=TOTAL):
    return Length.parse("--ramp", text).count_steps(total, EPOCH)


def build(text, steps=TOTAL):
    return build_optimizer(Arm.parse(text), nn.Linear(2, 2), steps_per_epoch=EPOCH, steps=steps)


def test_shares_epochs_and_steps():
    assert [count(text) for text in ("2.2%", "5ep", "0.5ep", "100", "100%", "0")] == [
        22, 100, 10, 100, 1000, 0,
    ]  # fmt: skip


def test_a_share_is_rounded_and_never_vanishes():
    assert [count("2.2%", total) for total in (10, 68, 70, 5880)] == [1, 1, 2, 129]
    assert count("0%", 10) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-1%", "--ramp must be a share of the run such as 2.2%, epochs .*; got '-1%'"),
        ("120%", "--ramp must be at most 100%, got 120%"),
        ("2.5", "or a number of steps; got '2.5'"),
        ("nan%", "got 'nan%'"),
        ("2.2", "got '2.2'"),
        ("5 epochs", "got '5 epochs'"),
        ("", "got ''"),
        ("51ep", "--ramp is 51ep, which is 1020 steps; the run has 1000"),
    ],
)
def test_what_is_no_part_of_a_run(text, message):
    with pytest.raises(UsageError, match=message):
        count(text)


def test_an_arm_takes_shares_of_the_run():
    (group,) = build("neumann:warmup=2.2%,reset=4.4%").param_groups
    assert (group["warmup_steps"], group["reset_steps"]) == (22, 44)
    (group,) = build("neumann:warmup=2.2%,reset=4.4%", steps=5880).param_groups
    assert (group["warmup_steps"], group["reset_steps"]) == (129, 259)
    (group,) = build("neumann:warmup=2ep,reset=7").param_groups
    assert (group["warmup_steps"], group["reset_steps"]) == (40, 7)
    assert str(Arm.parse("neumann:warmup=2.2%,lr=0.1")) == "neumann:warmup=2.2%,lr=0.1"


def test_parts_that_add_up_to_the_run_fit_although_both_are_rounded_up():
    (group,) = build("neumann:warmup=2.2%,reset=97.8%", steps=250).param_groups
    assert (group["warmup_steps"], group["reset_steps"]) == (6, 245)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("neumann:warmup=-1%", "neumann:warmup=-1%: warmup must be a share of the run"),
        ("neumann:reset=101%", "reset must be at most 100%"),
        ("neumann:warmup=60%,reset=50%", "warmup and reset add up to 110% of the run"),
        ("neumann:warmup=2%,warmup_epochs=5", "warmup and warmup_epochs cannot be combined"),
        ("neumann:reset=2%,reset_steps=5", "reset and reset_steps cannot be combined"),
        ("sgd:warmup=2%", "unknown sgd option 'warmup'"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_before_a_run(text, message):
    with pytest.raises(UsageError, match=message):
        Arm.parse(text).check()


def test_options_longer_than_the_run_are_refused():
    with pytest.raises(UsageError, match="warmup is 51ep, which is 1020 steps; the run has 1000"):
        build("neumann:warmup=51ep")
    with pytest.raises(UsageError, match=r"warmup and reset add up to 1010 steps; .* has 1000"):
        build("neumann:warmup=500,reset=510")
    with pytest.raises(ValueError, match="steps must be the length of the run"):
        build("neumann:warmup=2%", steps=None)
