"""torch.compile(optimizer.step, fullgraph=True): one graph for all phases, equal to eager steps."""

import warnings

import pytest
import torch
from torch._dynamo.utils import counters
from torch.optim import lr_scheduler

from neumann.optim import schedules
from neumann.optim.backends.traced import make_noise
from tests.optim.backends.test_choice import BFLOAT16_BOUND, LOW
from tests.support.compiled import (
    MARKS,
    STRONG,
    Compiled,
    check,
    difference,
    give_gradients,
    go,
    make,
    parameters,
    whole,
)
from tests.support.oracle_runs import Run, deviation, finished_oracle, optimizer_of

pytestmark = MARKS


LONG = Run(
    [{"sizes": (7,), "lr": 0.05}, {"sizes": ((3, 4),), "lr": 0.1, "weight_decay": 0.1}],
    steps=200,
    warmup=20,
    interval=15,
    options=STRONG,
    schedule=lambda step: 1 - step / 400,
)


@pytest.fixture(scope="module")
def oracle():
    return finished_oracle(LONG)


@pytest.mark.parametrize(
    ("backend", "tensor", "graphs"), [("eager", False, 2), ("inductor", True, 1)]
)
def test_two_hundred_steps_with_a_scheduler(oracle, backend, tensor, graphs):
    """A float learning rate is a constant to Dynamo until it changes: once more for its tensor."""
    optimizer = optimizer_of(LONG, torch.float64, fused=False)
    if tensor:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
    scheduler = lr_scheduler.LambdaLR(optimizer, LONG.schedule)
    compiled = Compiled(optimizer.step, backend)
    resets = 0
    for step in range(LONG.steps):
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                p.grad = torch.tensor(LONG.gradient(step, g, i, p.detach().numpy()))
        compiled()
        resets += optimizer.diagnostics().phase == "reset"
        scheduler.step()
    assert whole(compiled, graphs)
    assert counters["stats"]["unique_graphs"] == graphs
    assert resets == 4
    assert deviation(optimizer, oracle) < 1e-12


@pytest.mark.filterwarnings("ignore:a scheduler cycles the momentum")
@pytest.mark.parametrize("rate", [float, torch.tensor], ids=["float", "tensor"])
def test_schedulers_of_both_kinds(rate):
    """OneCycleLR moves the momentum too, always as a float: a second compilation."""
    for graphs, make_scheduler in (
        (1, lambda o: schedules.InverseTime(o, decay_steps=5.0, scale=2.0, ramp_steps=4)),
        (2, lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=20)),
    ):
        torch._dynamo.reset()
        ours, reference = make(), make()
        compiled = Compiled(ours.step)
        for optimizer, step in ((ours, compiled), (reference, reference.step)):
            for group in optimizer.param_groups:
                group["lr"] = rate(group["lr"])
            scheduler = make_scheduler(optimizer)
            for k in range(14):
                go(optimizer, step, 1, k)
                scheduler.step()
        assert whole(compiled, 2 if rate is float else graphs)
        assert difference(ours, reference) < 1e-13


def test_a_scheduler_that_steps_first_still_causes_a_warning():
    optimizer = make()
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()
    optimizer = make()
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    go(optimizer, optimizer.step, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_two_optimizers_in_one_graph():
    ours, others = [make(seed=s) for s in (0, 1)], [make(seed=s) for s in (0, 1)]

    def both():
        for optimizer in ours:
            optimizer.step()

    compiled = Compiled(both)
    for k in range(9):
        for optimizer in (*ours, *others):
            give_gradients(optimizer, k)
        compiled()
        for optimizer in others:
            optimizer.step()
    assert whole(compiled)
    assert max(map(difference, ours, others)) < 1e-13


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.1, "momentum": 0.5, "maximize": True},
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "reset_growth": 1.0},
        {"bounded": False, "variables": "elements", "warmup_steps": 0},
        {"cubic": 0.0, "repulsive": 0.0, "reset_steps": 0},
        {"repulsive": 0.0, "variables": 7, "reset_growth": 1.3},
        {"fused": None, "average": 0.5},
    ],
    ids=lambda options: " ".join(options),
)
def test_options(options):
    check(**options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_real_dtypes(dtype):
    """In half precision one rounding more or less, of w or of its slope, is a unit in w."""
    check(dtype=dtype, bound=4 * torch.finfo(dtype).eps)


def test_complex_parameters():
    check(dtype=torch.complex128, backend="aot_eager", missing=(1,))


def test_wider_state_than_weights():
    ours, _ = check(dtype=torch.bfloat16, state_dtype=torch.float32, bound=2e-2)
    assert ours.state[parameters(ours)[0]]["iterate"].dtype == torch.float32


def test_bfloat16_state_stays_within_its_bound_and_ignores_the_generator():
    results = []
    for seed, backend, steps in ((0, "aot_eager", 20), (1, "eager", LOW.steps)):
        torch.manual_seed(seed)
        optimizer = optimizer_of(LOW, torch.float32, state_dtype=torch.bfloat16)
        compiled = Compiled(optimizer.step, backend)
        for step in range(steps):
            for i, p in enumerate(parameters(optimizer)):
                p.grad = torch.tensor(LOW.gradient(step, 0, i, p.detach().double().numpy())).to(p)
            compiled()
            if step == 19:
                results.append([p.detach().clone() for p in parameters(optimizer)])
        assert whole(compiled)
    assert all(map(torch.equal, *results))
    assert {s["offset"].dtype for s in optimizer.state.values()} == {torch.bfloat16}
    assert 1e-6 < deviation(optimizer, finished_oracle(LOW)) < BFLOAT16_BOUND


def test_the_noise_is_uniform_and_differs():
    def noise(clock, number):
        state = torch.zeros(4096, dtype=torch.bfloat16)
        return make_noise(torch.tensor(clock), torch.zeros(4096), state, number)

    first = noise(1, 0)
    assert first.min() >= 0
    assert first.max() < 1 << 32
    for part in (first & 0xFFFF, first >> 16):
        assert abs(float(part.double().mean()) / 65535 - 0.5) < 0.02
    for other in (noise(2, 0), noise(1, 1)):
        assert int((first == other).sum()) < 3
        joint = torch.stack([first.double(), other.double()])
        assert abs(float(torch.corrcoef(joint)[0, 1])) < 0.06
