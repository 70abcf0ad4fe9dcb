"""torch.compile(optimizer.step, fullgraph=True): one graph for all phases, equal to eager steps."""

import copy
import warnings

import pytest
import torch
from test_fused import BFLOAT16_BOUND, LOW
from torch import nn
from torch._dynamo.utils import counters
from torch.optim import lr_scheduler

import oracle_runs
from neumann import Neumann
from neumann.optim import schedules, traced_update
from oracle_runs import FUSED, Run, deviation, finished_oracle, optimizer_of

STRONG = {"cubic": 0.05, "repulsive": 0.05}
CLOCK = {"warmup_steps": 3, "reset_steps": 4}

# From inside torch, where its compiler is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def _afresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Compiled:
    """A step compiled as one graph, which counts the graphs that were finished."""

    def __init__(self, step, backend="eager"):
        self.graphs = 0
        self.backend = torch._dynamo.lookup_backend(backend)
        self.step = torch.compile(step, fullgraph=True, backend=self._compile)

    def _compile(self, module, inputs):
        finished = self.backend(module, inputs)  # or raises, where Dynamo traces once more
        self.graphs += 1
        return finished

    def __call__(self, *args):
        return self.step(*args)


def whole(compiled, graphs=1):
    """So many graphs, which is also not none, and nothing between them."""
    return compiled.graphs == graphs and not counters["graph_break"]


def parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def make(shapes=((5,), (3, 4)), dtype=torch.float64, seed=0, **options):
    """An optimizer of two groups."""
    generator = torch.Generator().manual_seed(seed)
    made = [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in shapes
    ]
    groups = [{"params": made[:1]}, {"params": made[1:], "lr": 0.02}]
    return Neumann(groups, **{"lr": 0.1, "fused": False, **CLOCK, **STRONG, **options})


def give_gradients(optimizer, step, missing=()):
    """Noise around a slope, the same for the same weights."""
    for i, p in enumerate(parameters(optimizer)):
        if i in missing:
            p.grad = None
            continue
        generator = torch.Generator().manual_seed(1000 * step + i)
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        slope = 0.5 * p.detach().to(torch.complex128 if p.is_complex() else torch.float64)
        p.grad = (slope + noise).to(p.dtype)


def go(optimizer, step, steps, start=0, missing=()):
    for k in range(start, start + steps):
        give_gradients(optimizer, k, missing)
        step()


def difference(one, other):
    """The largest relative difference in any parameter or state."""
    pairs = list(zip(parameters(one), parameters(other), strict=True))
    for p, q in pairs[:]:
        assert one.state[p].keys() == other.state[q].keys()
        pairs += [(one.state[p][key], other.state[q][key]) for key in one.state[p]]
    errors = []
    for a, b in pairs:
        wide = torch.complex128 if a.is_complex() else torch.float64
        a, b = a.detach().to(wide), b.detach().to(wide)
        errors.append(float((a - b).norm() / b.norm().clamp(min=1e-30)))
    return max(errors)


def check(steps=16, bound=1e-13, missing=(), backend="eager", **options):
    """Compiled steps beside eager ones."""
    ours, reference = make(**options), make(**options)
    compiled = Compiled(ours.step, backend)
    go(ours, compiled, steps, missing=missing)
    go(reference, reference.step, steps, missing=missing)
    assert whole(compiled)
    assert difference(ours, reference) <= bound
    assert ours.diagnostics().step == reference.diagnostics().step
    return ours, reference


# ---------------------------------------------------------------------- graphs

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
    ("backend", "tensor", "graphs"),
    [("aot_eager", False, 2), ("aot_eager", True, 1), ("inductor", True, 1)],
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


def test_a_scheduler_before_any_step_is_still_warned_of():
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


# ---------------------------------------------------------------------- options


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


# ---------------------------------------------------------------------- gradients


def test_parameters_without_a_gradient():
    ours, reference = make(), make()
    compiled = Compiled(ours.step)
    for optimizer, step in ((ours, compiled), (reference, reference.step)):
        go(optimizer, step, 6)
        go(optimizer, step, 5, start=6, missing=(0,))  # over the reset at t = 5
    assert whole(compiled, 2)
    assert difference(ours, reference) < 1e-13
    assert not ours.state[parameters(ours)[0]]["iterate"].any()


def test_a_frozen_parameter_needs_one_eager_step_when_it_thaws():
    ours, reference = make(), make()
    compiled = Compiled(ours.step)
    for optimizer in (ours, reference):
        late = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
        optimizer.add_param_group({"params": [late]})
    for optimizer, step in ((ours, compiled), (reference, reference.step)):
        go(optimizer, step, 5, missing=(2,))
        parameters(optimizer)[2].requires_grad_(True)
    refused(ours, "parameter 0 of group 2 was frozen until now")
    for optimizer, step in ((ours, compiled), (reference, reference.step)):
        go(optimizer, optimizer.step, 1, start=5)
        go(optimizer, step, 4, start=6)
    assert whole(compiled, 2)
    assert difference(ours, reference) < 1e-13


def test_a_nan_does_not_survive_a_reset():
    ours, reference = make(), make()
    compiled = Compiled(ours.step)
    for optimizer, step in ((ours, compiled), (reference, reference.step)):
        go(optimizer, step, 7)
        optimizer.state[parameters(optimizer)[0]]["iterate"][0] = float("nan")
        go(optimizer, step, 3, start=7)  # the first is the reset at t = 5
    assert difference(ours, reference) < 1e-13


def test_an_overflow_at_a_reset_moves_no_weight():
    ours = make()
    compiled = Compiled(ours.step)
    go(ours, compiled, 7)
    before = parameters(ours)[0].detach().clone()
    give_gradients(ours, 7)
    parameters(ours)[0].grad[1] = float("inf")
    compiled()
    assert ours.diagnostics().phase == "reset"
    assert torch.equal(parameters(ours)[0], before)


def test_skip_nonfinite():
    ours, reference = make(skip_nonfinite=True), make(skip_nonfinite=True)
    compiled = Compiled(ours.step)
    for step in range(12):
        for optimizer, call in ((ours, compiled), (reference, reference.step)):
            give_gradients(optimizer, step)
            if step in (1, 3, 8):  # in the warm-up, where a reset would be, and after it
                parameters(optimizer)[1].grad[0, 0] = float("nan")
            before = copy.deepcopy(optimizer.state_dict()["state"][0])
            call()
            if step in (1, 3, 8):
                after = optimizer.state_dict()["state"][0]
                assert all(
                    torch.equal(before[key], after[key]) for key in before if key != "skipped"
                )
    assert whole(compiled)
    assert difference(ours, reference) < 1e-13
    found = ours.diagnostics()
    assert (found.step, found.skipped) == (9, 3)


def test_what_a_grad_scaler_sets():
    ours, reference = make(), make()
    compiled = Compiled(ours.step)
    ours.grad_scale, ours.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    for step in range(10):
        give_gradients(ours, step)
        for p in parameters(ours):
            p.grad.mul_(8)
        ours.found_inf.fill_(step in (2, 5))
        compiled()
        if step not in (2, 5):
            go(reference, reference.step, 1, step)
    assert whole(compiled)
    assert difference(ours, reference) < 1e-13
    assert ours.diagnostics().step == 8


# ---------------------------------------------------------------------- low-precision state


def test_bfloat16_state_stays_within_its_bound_and_ignores_the_generator():
    results = []
    for seed, backend, steps in ((0, "eager", 20), (1, "aot_eager", LOW.steps)):
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
        zero = torch.zeros(())
        tensors = traced_update._Tensors(
            torch.zeros(4096),
            torch.zeros(4096),
            torch.zeros(4096, dtype=torch.bfloat16),
            None,
            traced_update.Row(*[zero] * 9),
            torch.float32,
            {},
            number,
        )
        return traced_update._noise(torch.tensor(clock), tensors)

    first = noise(1, 0)
    assert first.min() >= 0
    assert first.max() < 1 << 32
    for part in (first & 0xFFFF, first >> 16):
        assert abs(float(part.double().mean()) / 65535 - 0.5) < 0.02
    for other in (noise(2, 0), noise(1, 1)):
        assert int((first == other).sum()) < 3
        joint = torch.stack([first.double(), other.double()])
        assert abs(float(torch.corrcoef(joint)[0, 1])) < 0.06


# ---------------------------------------------------------------------- going back and forth


@pytest.mark.parametrize("implementation", ["foreach", *FUSED])
def test_eager_and_compiled_steps_take_turns(implementation):
    """Whatever a kernel had pending counts; nobody takes the graph's writes for somebody else's."""
    ours = make(**oracle_runs.IMPLEMENTATIONS[implementation] | {"fused": implementation in FUSED})
    reference = make()
    compiled = Compiled(ours.step)
    start = 0
    for steps, step in ((5, ours.step), (4, compiled), (3, ours.step), (2, compiled)):
        go(ours, step, steps, start)
        start += steps
    assert ours.diagnostics().as_dict()["distance"] > 0
    with ours.evaluating():
        pass
    go(ours, ours.step, 1, start)
    go(reference, reference.step, start + 1)
    ours.state_dict()  # settles
    assert whole(compiled)
    assert difference(ours, reference) < 1e-13


def test_a_state_dict_between_compiled_steps():
    ours = make()
    compiled = Compiled(ours.step)
    go(ours, compiled, 6)
    saved = copy.deepcopy(ours.state_dict())
    kept = [p.detach().clone() for p in parameters(ours)]
    go(ours, compiled, 6, 6)
    after = [p.detach().clone() for p in parameters(ours)]
    with torch.no_grad():
        for p, w in zip(parameters(ours), kept, strict=True):
            p.copy_(w)
    ours.load_state_dict(saved)
    go(ours, compiled, 6, 6)
    assert all(map(torch.equal, after, parameters(ours)))
    assert ours.diagnostics().step == 12


def test_evaluation_between_compiled_steps():
    ours, reference = make(), make()
    compiled = Compiled(ours.step)
    go(ours, compiled, 8)
    go(reference, reference.step, 8)
    pairs = zip(ours.eval_params(), reference.eval_params(), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-13) for a, b in pairs)
    with ours.evaluating():
        pass
    go(ours, compiled, 4, 8)
    go(reference, reference.step, 4, 8)
    assert whole(compiled)
    assert difference(ours, reference) < 1e-13


# ---------------------------------------------------------------------- refusals


# Dynamo of torch 2.6 does not follow an exception out of a `with`, and says that instead.
FOLLOWS = hasattr(torch._dynamo.symbolic_convert.InstructionTranslatorBase, "WITH_EXCEPT_START")


def refused(optimizer, match):
    before = [p.detach().clone() for p in parameters(optimizer)]
    give_gradients(optimizer, 0)
    with pytest.raises(RuntimeError, match=match if FOLLOWS else "WITH_EXCEPT_START"):
        Compiled(optimizer.step)()
    assert all(map(torch.equal, before, parameters(optimizer)))


def test_evaluation_mode_is_refused():
    refused(make().eval(), "evaluation mode would update the wrong weights")


def test_differentiable_is_refused():
    refused(make(fused=None, differentiable=True), "differentiable=True cannot be compiled")


def test_asking_other_processes_is_refused(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        refused(make(skip_nonfinite=True), "asks all processes")
        check(steps=2)
    finally:
        torch.distributed.destroy_process_group()
