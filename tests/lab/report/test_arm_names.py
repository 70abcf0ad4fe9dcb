"""Short names of arms: they say what differs, and no two are the same."""

import pytest

from neumann.lab.report.arm_names import shorten_names
from neumann.lab.report.headings import name_arms

LONG = "neumann:warmup_epochs=1,reset_epochs=2,momentum=0.85,cubic=1e-6,bounded=false"


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (["neumann:lr=0.2,momentum=0.8", "sgd"], ["neumann", "sgd"]),
        (["sgd:lr=0.1,momentum=0.9", "sgd:lr=0.1"], ["sgd (momentum 0.9)", "sgd"]),
        (["adamw:lr=1e-3", "adamw:lr=1e-4"], ["adamw (lr 1e-3)", "adamw (lr 1e-4)"]),
        (
            ["sgd:lr=0.1@sched=step", "sgd:lr=0.1@sched=linear"],
            ["sgd (sched step)", "sgd (sched linear)"],
        ),
        (["base=sgd:lr=0.1@sched=step", "sgd"], ["base", "sgd"]),
        (
            ["adamw:betas=(0.9,0.95),lr=1", "adamw:betas=(0.9,0.999),lr=1"],
            ["adamw (betas (0.9,0.95))", "adamw (betas (0.9,0.999))"],
        ),
        ([LONG, "neumann"], ["neumann (warmup epochs 1)", "neumann"]),
        # What is not an arm keeps its text, and so do arms that would get one name.
        (["<b>x</b>", "sgd:<i>=1", "$a_b$"], ["<b>x</b>", "sgd:<i>=1", "$a_b$"]),
        (["sgd:lr=1,momentum=0", "sgd:momentum=0,lr=1"],) * 2,
        (["sgd (lr 2)", "sgd:lr=2", "sgd"], ["sgd (lr 2)", "sgd:lr=2", "sgd"]),
    ],
)
def test_short_names(texts, names):
    assert list(shorten_names(texts).values()) == names


def test_a_title_counts_the_arms_it_does_not_name():
    assert name_arms(["a", "b", "c"]) == "a, b and c"
    many = [f"optimizer-{index}" for index in range(9)]
    assert name_arms(many) == "optimizer-0, optimizer-1, optimizer-2 and 6 others"
    assert name_arms(["x" * 50, "y" * 50]) == f"{'x' * 50} and 1 other"
    assert name_arms(["x" * 99]) == "x" * 99
