"""An unknown flag is answered with the flag that was probably meant, or with the help."""

import pytest

from neumann.lab.commands.flag_advice import OPTIONS, OTHER_WORDS
from neumann.lab.commands.flag_check import check_words
from neumann.lab.commands.flags import SETTINGS, list_flags
from neumann.lab.errors import UsageError
from neumann.lab.optimizers.arms import Arm, check_arm


@pytest.mark.parametrize(
    ("command", "flag", "hint"),
    [
        ("train", "--optimizer", "did you mean --opt?"),
        ("compare", "--optimizer", "did you mean --arms?"),
        ("sweep", "--optimizer", "did you mean --arms?"),
        ("compare", "--opt", "did you mean --arms?"),
        ("sweep", "--opt", "did you mean --arms?"),
        ("sweep", "--opts", "did you mean --arms?"),
        ("train", "--arms", "did you mean --opt?"),
        ("compare", "--arm", "did you mean --arms?"),
        ("train", "--gpu", "did you mean --device?"),
        ("train", "--bs", "did you mean --batch-size?"),
        ("train", "-bs", "did you mean --batch-size?"),
        ("train", "--epoch", "did you mean --epochs?"),
        ("train", "--warmup-epochs", "did you mean --ramp?"),
        ("train", "--no-flp", "did you mean --no-flip"),
        ("train", "--momentum", "it is an option of the optimizer: --opt sgd:momentum=0.9"),
        ("sweep", "--momentum", "it is an option of the optimizer: --arms sgd:momentum=0.9"),
        (
            "train",
            "--betas",
            "it is an option of the optimizer: --opt 'adamw:betas=(0.9,0.95)'",
        ),
        ("demo", "--bs", "neumann demo --help lists the flags"),
        ("demo", "--momentum", "neumann demo --help lists the flags"),
        ("report", "--gpu", "neumann report --help lists the flags"),
        ("train", "--xyz", "neumann train --help lists the flags"),
        ("train", "-x", "neumann train --help lists the flags"),
    ],
)
def test_advice(command, flag, hint):
    with pytest.raises(UsageError) as error:
        check_words(command, [flag, "help"])
    assert str(error.value).startswith(f"unknown flag {flag!r}; {hint}")


@pytest.mark.parametrize("arm", OPTIONS.values())
def test_the_options_are_those_of_arms(arm):
    check_arm(Arm.parse(arm))


def test_no_other_word_hides_a_flag():
    """Words are looked up only for unknown flags, and what they stand for exists."""
    known = {name for command in SETTINGS for flag in list_flags(command) for name in flag.names}
    assert {name for meant in OTHER_WORDS.values() for name in meant} <= known
    assert not {f"--{option}" for option in OPTIONS} & known
