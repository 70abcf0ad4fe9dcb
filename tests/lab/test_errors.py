"""Suggestions for unknown names: by initials first, then by spelling."""

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


def test_all_names_with_the_same_initials_are_suggested():
    assert find_near_names("--se", ["--spectrum-every", "--search-epochs", "--seed"]) == [
        "--search-epochs",
        "--spectrum-every",
    ]
