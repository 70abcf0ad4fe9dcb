"""Every implementation against Algorithm 2 in long double, through all phases."""

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.oracle_runs import IMPLEMENTATIONS as ALL
from tests.support.oracle_runs import SIZES, Run, deviation, finished, finished_oracle

# The Triton kernel, which CI interprets, is held to the oracle in its own test, at smaller sizes.
IMPLEMENTATIONS = {name: options for name, options in ALL.items() if name != "triton"}
SMALL = (1, 3, 7, 16)
ONE = [{"sizes": SMALL, "lr": 0.1}]
TWO = [
    {"sizes": (1, 16), "lr": 0.1, "weight_decay": 0.01},
    {"sizes": (3, 7), "lr": 0.03, "momentum": 0.6},
]
STRONG = {"cubic": 0.05, "repulsive": 0.05}  # forces of the size of the gradient

RUNS = {
    "defaults": Run(ONE),
    "two groups": Run(TWO),
    "three groups, one empty": Run(
        [{"sizes": (5,), "lr": 0.2}, {"sizes": (), "lr": 0.1}, {"sizes": (1000,), "lr": 0.05}]
    ),
    "no forces": Run(ONE, options={"cubic": 0.0, "repulsive": 0.0}),
    "cubic alone, large": Run(ONE, options={"cubic": 0.05, "repulsive": 0.0}),
    "repulsion alone, large": Run(ONE, options={"cubic": 0.0, "repulsive": 0.05}),
    "both large": Run(TWO, options=STRONG),
    "both large, unbounded": Run(TWO, options={**STRONG, "bounded": False}),
    "elements": Run(TWO, options={"variables": "elements"}),
    "counted": Run(TWO, options={"variables": 1234, "bounded": False}),
    "slow average": Run(ONE, options={**STRONG, "average": 0.5}),
    "no average": Run(ONE, options={**STRONG, "average": 0.0}),
    "weight decay": Run(ONE, options={"weight_decay": 0.05}),
    "decoupled decay": Run(TWO, options={"weight_decay": 0.05, "decoupled_weight_decay": True}),
    "maximize": Run(
        ONE, scale=-1.0, options={"maximize": True, "weight_decay": 0.01, "cubic": 0.01}
    ),
    "growth one": Run(ONE, interval=10, options={"reset_growth": 1.0, **STRONG}),
    "growth fractional": Run(ONE, interval=3, options={"reset_growth": 1.5, **STRONG}),
    "one reset": Run(ONE, interval=0, options=STRONG),
    "no warm-up": Run(ONE, warmup=0, options=STRONG),
    "no momentum": Run(ONE, options={"momentum": 0.0, **STRONG}),
    "ramp and cosine": Run(
        TWO,
        schedule=lambda step: min(1, step / 60) * (1 + math.cos(math.pi * step / 300)) / 2,
        options=STRONG,
    ),
    "lr zero for a while": Run(
        ONE, schedule=lambda step: float(not 35 <= step < 60), options=STRONG
    ),
    "gradients missing": Run(
        TWO, missing=lambda step, g, i: (step + 3 * g + i) % 5 == 0, options=STRONG
    ),
    "all sizes": Run([{"sizes": SIZES, "lr": 0.1}], options={"cubic": 1e-3, "repulsive": 1e4}),
}


@cache
def exact(name: str):
    return finished_oracle(RUNS[name])


# `make check` runs these; together they have every term of the update.
QUICK = ("no forces", "both large", "decoupled decay", "maximize", "gradients missing")


# These change numbers that all implementations get from the same code, and no term of the update.
# One implementation stands for all of them; test_any_layout mixes such numbers for each.
NUMBERS_ALONE = (
    "cubic alone, large", "repulsion alone, large", "both large, unbounded", "elements", "counted",
    "slow average", "growth one", "growth fractional", "one reset", "no warm-up", "no momentum",
    "ramp and cosine",
)  # fmt: skip


def cases():
    for name in RUNS:
        for implementation in IMPLEMENTATIONS:
            if name not in NUMBERS_ALONE or implementation == "foreach":
                marks = [] if name in QUICK else pytest.mark.slow
                yield pytest.param(name, implementation, marks=marks)


@pytest.mark.parametrize(("name", "implementation"), list(cases()))
def test_float64(name, implementation):
    run = RUNS[name]
    optimizer = finished(run, torch.float64, **IMPLEMENTATIONS[implementation])
    assert deviation(optimizer, exact(name)) < 1e-12
    if run.interval:
        assert run.steps >= 300
        assert exact(name).resets >= 3


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["defaults", "both large", "decoupled decay", "all sizes"])
def test_float32(name, implementation):
    optimizer = finished(RUNS[name], torch.float32, **IMPLEMENTATIONS[implementation])
    assert deviation(optimizer, exact(name)) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_same_run_twice_has_the_same_bits(implementation):
    run = Run([{"sizes": (7, 1000), "lr": 0.1}], steps=100, options=STRONG)
    first, second = (finished(run, torch.float32, **IMPLEMENTATIONS[implementation]) for _ in "ab")
    for a, b in zip(first.param_groups[0]["params"], second.param_groups[0]["params"], strict=True):
        assert torch.equal(a, b)


shape_strategy = st.lists(st.integers(0, 7), max_size=4).map(tuple) | st.sampled_from([16, 33])
group_strategy = st.fixed_dictionaries(
    {
        "sizes": st.lists(shape_strategy, max_size=4),
        "lr": st.floats(1e-4, 0.3),
        "momentum": st.floats(0, 0.95),
        "weight_decay": st.floats(0, 0.1),
    }
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    groups=st.lists(group_strategy, min_size=1, max_size=3).filter(
        lambda groups: any(group["sizes"] for group in groups)
    ),
    warmup=st.integers(0, 15),
    interval=st.integers(0, 15),
    growth=st.sampled_from([1.0, 1.3, 2.0]),
    cubic=st.sampled_from([0.0, 1e-7, 0.01]),
    repulsive=st.sampled_from([0.0, 1e-5, 0.01]),
    decoupled=st.booleans(),
    implementation=st.sampled_from(sorted(IMPLEMENTATIONS)),
)
def test_any_layout(groups, warmup, interval, growth, cubic, repulsive, decoupled, implementation):
    if interval == 1 and growth == 1.0:
        interval = 2
    options = {
        "cubic": cubic,
        "repulsive": repulsive,
        "reset_growth": growth,
        "decoupled_weight_decay": decoupled,
    }
    run = Run(groups, steps=60, warmup=warmup, interval=interval, options=options)
    optimizer = finished(run, torch.float64, **IMPLEMENTATIONS[implementation])
    assert deviation(optimizer, finished_oracle(run)) < 1e-12
