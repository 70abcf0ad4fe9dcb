"""Suggestions for unknown names: slips of the hand, other forms and initials, like spellings."""

import pytest

from neumann.lab.errors import find_near_names, unknown

FLAGS = ["--batch-size", "--bn-batch", "--weight-decay", "--lr", "--micro-batch-size", "--seeds"]


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("--bs", ["--batch-size"]),
        ("-bs", ["--batch-size"]),
        ("--wd", ["--weight-decay"]),
        ("--mbs", ["--micro-batch-size"]),
        ("--learning-rate", ["--lr"]),
        ("--learning_rate", ["--lr"]),
        ("--seed", ["--seeds"]),
        ("--batchsize", ["--batch-size"]),
        ("--x", []),
    ],
)
def test_near_flags(given, near):
    assert find_near_names(given, FLAGS)[:1] == near


def test_initials_of_settings_in_files():
    assert find_near_names("bs", ["batch_size", "bn_batch"]) == ["batch_size"]


def test_a_single_word_has_no_initials():
    """Otherwise "a" would suggest "adamw", and "" everything."""
    assert find_near_names("a", ["sgd", "adamw"]) == find_near_names("", ["sgd"]) == []
    assert "choose from: sgd, adamw" in str(unknown("optimizer", "a", ["sgd", "adamw"]))


def test_longer_and_shorter_forms_come_first():
    known = ["--spectrum-every", "--search-epochs", "--seed", "--opt"]
    assert find_near_names("--se", known) == ["--seed", "--search-epochs", "--spectrum-every"]
    assert find_near_names("--optimizer", [*known, "--img-size", "--compile"]) == ["--opt"]
    assert find_near_names("resnet", ["resnet50x", "resnet18", "resnet101"]) == [
        *("resnet18", "resnet50x", "resnet101")
    ]


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ("--optimizer", ["--img-size", "--compile"]),
        ("--arms", ["--amp", "--ramp"]),
        ("--opts", ["--jobs"]),
        ("--bs", ["--jobs"]),
        ("rest_lr", ["reset", "reset_growth", "reset_steps"]),
    ],
)
def test_what_is_hardly_alike_is_not_suggested(given, known):
    assert find_near_names(given, known) == []


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("sdg", "sgd"),
        ("Sgd", "sgd"),
        ("--wrokers", "--workers"),
        ("--Lr", "--lr"),
        ("--opr", "--opt"),
        ("--data-dr", "--data-dir"),
        ("--rampepochs", "--ramp-epochs"),
        ("neumann-spetral", "neumann-spectral"),
        ("nadammw", "nadamw"),
    ],
)
def test_a_slip_of_the_hand_comes_first(given, near):
    names = ["sgd", "neumann", "neumann-spectral", "neumann-diagonal", "nadam", "nadamw", "adamw"]
    flags = ["--workers", "--lr", "--opt", "--data", "--data-dir", "--ramp", "--ramp-epochs"]
    assert find_near_names(given, [*names, *flags])[0] == near
