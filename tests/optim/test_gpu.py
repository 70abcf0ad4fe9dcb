"""What only a GPU can show. The last real output is kept under results/gpu-tests.txt."""

import copy

import pytest
import torch
from torch import nn

from neumann import Neumann
from neumann.optim.preconditioners import SlowMomentum, Spectral
from tests.support.oracle_runs import (
    Run,
    advance,
    deviation,
    finished,
    finished_oracle,
    optimizer_of,
)
from tests.support.preconditioned import memory

pytestmark = pytest.mark.gpu

SLOW = Spectral(before=SlowMomentum(0.6, start=3))
PRECONDITIONERS = [None, "diagonal", "spectral", SLOW]
STRONG = {"cubic": 0.05, "repulsive": 0.05}
RUN = Run(
    [
        {"sizes": (1, 16, 1000), "lr": 0.1, "weight_decay": 0.01},
        {"sizes": (3, 70_000), "lr": 0.03, "momentum": 0.6},
    ],
    options={"cubic": 1e-3, "repulsive": 1e4},
)


@pytest.fixture(scope="module")
def exact():
    return finished_oracle(RUN)


def test_the_kernel_is_chosen():
    p = nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = Neumann([p], lr=0.1, warmup_steps=1, reset_steps=0)
    assert optimizer._backend.name == "triton"
    assert optimizer._step_supports_amp_scaling


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_against_the_oracle(exact, options, dtype, bound):
    optimizer = finished(RUN, dtype, device="cuda", **options)
    assert deviation(optimizer, exact) < bound


def test_bfloat16_state(exact):
    optimizer = finished(RUN, torch.float32, device="cuda", state_dtype=torch.bfloat16)
    assert deviation(optimizer, exact) < 2e-2


def test_the_same_run_twice_has_the_same_bits():
    run = copy.copy(RUN)
    run.steps = 60
    for options in ({}, {"state_dtype": torch.bfloat16}):
        first, second = (finished(run, torch.float32, device="cuda", **options) for _ in "ab")
        for a, b in zip(first.eval_params(), second.eval_params(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("stop", [5, 41, 55])
def test_a_resumed_run_has_the_same_bits(stop):
    run = copy.copy(RUN)
    run.steps = 90
    whole = finished(run, torch.float32, device="cuda")
    half = optimizer_of(run, torch.float32, device="cuda")
    for step in range(stop):
        advance(run, half, step)
    rest = optimizer_of(run, torch.float32, device="cuda")
    rest.load_state_dict(copy.deepcopy(half.state_dict()))
    with torch.no_grad():
        for ours, theirs in zip(rest.param_groups, half.param_groups, strict=True):
            for p, q in zip(ours["params"], theirs["params"], strict=True):
                p.copy_(q)
    for step in range(stop, run.steps):
        advance(run, rest, step)
    for a, b in zip(whole.eval_params(), rest.eval_params(), strict=True):
        assert torch.equal(a, b)


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).cuda()
    return model, torch.randn(40, 64, 8, device="cuda")


@pytest.mark.parametrize("precondition", PRECONDITIONERS)
@pytest.mark.parametrize("skip_nonfinite", [False, True])
def test_no_step_waits_for_the_host(skip_nonfinite, precondition):
    model, data = network()
    options = {"skip_nonfinite": skip_nonfinite, "precondition": precondition, **STRONG}
    optimizer = Neumann(model.parameters(), lr=0.1, warmup_steps=4, reset_steps=5, **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)

    def train(x):
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()
        schedule.step()
        return optimizer.diagnostics()

    train(data[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        snapshots = [train(x) for x in data[1:30]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [s.step for s in snapshots] == list(range(2, 31))
    assert snapshots[3].phase == "reset"


@pytest.mark.parametrize("precondition", PRECONDITIONERS)
def test_a_captured_graph_replays_all_phases_with_a_changing_lr(precondition):
    """Forward, backward and step captured once, replayed, against eager steps: the same bits."""

    def build():
        model, data = network()
        options = {"capturable": True, "precondition": precondition, **STRONG}
        optimizer = Neumann(model.parameters(), lr=0.1, warmup_steps=6, reset_steps=7, **options)
        return model, data, optimizer

    def body(model, optimizer, x):
        model(x).square().mean().backward()
        optimizer.step()
        for p in model.parameters():
            p.grad.zero_()

    lrs = [0.1 / (1 + step) for step in range(40)]
    captured, data, optimizer = build()
    eager, _, reference = build()
    for model in (captured, eager):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    static = data[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in range(3):
            optimizer.param_groups[0]["lr"].fill_(lrs[step])
            static.copy_(data[step])
            body(captured, optimizer, static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body(captured, optimizer, static)
    phases = set()
    for step in range(40):
        reference.param_groups[0]["lr"].fill_(lrs[step])
        body(eager, reference, data[step])
        if step >= 3:
            optimizer.param_groups[0]["lr"].fill_(lrs[step])
            static.copy_(data[step])
            graph.replay()
            phases.add(optimizer.diagnostics().phase)
            for p, q in zip(captured.parameters(), eager.parameters(), strict=True):
                assert torch.equal(p, q)
    assert phases == {"warm-up", "reset", "iterate"}
    assert optimizer.diagnostics().as_dict() == reference.diagnostics().as_dict()


@pytest.mark.parametrize("precondition", PRECONDITIONERS)
def test_grad_scaler_skips_without_asking_the_host(precondition):
    model, data = network()
    options = {"precondition": precondition, **STRONG}
    optimizer = Neumann(model.parameters(), lr=0.1, warmup_steps=2, reset_steps=3, **options)
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0)
    for step in range(12):
        optimizer.zero_grad()
        scaler.scale(model(data[step]).square().mean()).backward()
        before = copy.deepcopy([p.detach() for p in model.parameters()])
        remembered = copy.deepcopy(memory(optimizer))
        if step % 4 == 1:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        resets = optimizer.diagnostics().phase == "reset"
        assert all(same) == (step % 4 == 1 or resets)
        if step % 4 == 1:
            assert all(map(torch.equal, remembered, memory(optimizer)))
    assert optimizer.diagnostics().step == 9


@pytest.mark.parametrize("precondition", ["diagonal", "spectral"])
def test_preconditioned_steps_of_all_implementations_agree(precondition):
    """Given the same gradients: those of a loss would follow every last bit of the weights."""
    found = []
    for form in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        model, _ = network()
        options = {"precondition": precondition, **STRONG, **form}
        optimizer = Neumann(model.parameters(), lr=0.01, warmup_steps=2, reset_steps=9, **options)
        generator = torch.Generator("cuda").manual_seed(0)
        for _ in range(20):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator, device="cuda")
            optimizer.step()
        found.append(torch.cat([p.flatten() for p in optimizer.eval_params()]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-5)


def test_spectral_directions_are_those_of_the_cpu():
    """In bfloat16, and filled up with zeros where that saves kernels; in any memory format."""
    shapes = [(64, 3, 3, 3), (64, 64, 1, 1), (256, 64, 1, 1), (64, 256), (128, 64, 3, 3), (10, 512)]
    gradients = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes]
    on_gpu = [g.cuda() for g in gradients]
    last = [g.to(memory_format=torch.channels_last) if g.ndim == 4 else g for g in on_gpu]
    expected = Spectral().apply(gradients, [{} for _ in shapes])
    for given in (on_gpu, last):
        found = Spectral().apply(given, [{} for _ in shapes])
        for ours, theirs, gradient in zip(found, expected, given, strict=True):
            assert ours.stride() == gradient.stride()
            difference = (ours.cpu() - theirs).norm() / theirs.norm()
            assert difference < 0.06  # five iterations in bfloat16 leave 0.015


def test_more_than_two_to_the_31_elements():
    size = 2**31 + 4096 + 3
    p = nn.Parameter(torch.ones(size, dtype=torch.bfloat16, device="cuda"))
    p.grad = torch.ones(size, dtype=torch.bfloat16, device="cuda")
    small = nn.Parameter(torch.ones(16, dtype=torch.bfloat16, device="cuda"))
    small.grad = torch.ones_like(small)
    options = {"warmup_steps": 1, "reset_steps": 0, "cubic": 0.0, "repulsive": 0.0}
    large, little = (Neumann([q], lr=0.125, **options) for q in (p, small))
    for _ in range(4):
        large.step()
        little.step()
    # Without forces the state of bfloat16 sums of powers of two is exact to a rounding.
    for part in (slice(0, 16), slice(2**31 - 8, 2**31 + 8), slice(size - 16, size)):
        assert torch.allclose(p.detach()[part].float(), small.detach().float(), rtol=0.02)
    assert p.detach().min() > 0.2
    assert p.detach().max() < 1.0


@pytest.mark.parametrize("precondition", PRECONDITIONERS)
def test_a_model_that_is_moved_before_the_first_step(precondition):
    def train(model, optimizer):
        for step in range(5):
            model.zero_grad()
            model(torch.full((4, 8), float(step), device="cuda")).square().mean().backward()
            optimizer.step()
        return list(model.parameters())

    def build(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).to(device)
        options = {"warmup_steps": 1, "reset_steps": 3}
        return model, Neumann(model.parameters(), lr=0.1, precondition=precondition, **options)

    model, optimizer = build("cpu")
    moved_later = train(model.cuda(), optimizer)
    assert optimizer._backend.name == "triton"
    for ours, theirs in zip(moved_later, train(*build("cuda")), strict=True):
        assert torch.equal(ours, theirs)


def moved(optimizer, device):
    """What Lightning does before and after fit(): all state but the clock, one tensor at a time."""
    for entry in optimizer.state.values():
        for key, value in entry.items():
            if key != "step":
                entry[key] = value.to(device)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}])
def test_state_that_was_moved_by_a_trainer(options):
    def build():
        model, data = network()
        options_ = {"warmup_steps": 3, "reset_steps": 4, **STRONG, **options}
        return model, data, Neumann(model.parameters(), lr=0.1, **options_)

    def train(model, data, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            model(data[step]).square().mean().backward()
            optimizer.step()

    model, data, optimizer = build()
    plain, _, reference = build()
    moved(optimizer, "cuda")
    train(model, data, optimizer, range(12))
    train(plain, data, reference, range(12))
    for ours, theirs in zip(optimizer.eval_params(), reference.eval_params(), strict=True):
        assert torch.equal(ours, theirs)
    moved(optimizer, "cpu")
    saved = copy.deepcopy({"model": model.cpu().state_dict(), "optimizer": optimizer.state_dict()})
    fresh, _, other = build()
    fresh.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    train(fresh, data, other, range(12, 20))
    train(plain, data, reference, range(12, 20))
    for p, q in zip(fresh.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
