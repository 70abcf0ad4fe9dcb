"""P in a CUDA graph: the steps are those of an optimizer without one, whatever changes.

Without a GPU a stand-in for the graph repeats the call and writes its results where those of the
first call were. Like a capture, it changes nothing when it is made.
"""

import copy

import pytest
import torch
from torch import nn

import neumann
from neumann import Neumann
from neumann.optim.preconditioners import Momentum, SlowMomentum, Spectral, captured
from neumann.optim.preconditioners.captured import ORDINARY_STEPS, can_capture


class Graphs:
    """Makes stand-ins for graphs of what an optimizer does; counts captures and replays."""

    def __init__(self, optimizer):
        self.optimizer, self.captures, self.replays = optimizer, 0, 0

    def capture(self, call):
        tensors = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        before = [tensor.clone() for tensor in tensors]
        found = call()
        torch._foreach_copy_(tensors, before)
        self.captures += 1

        def replay():
            self.replays += 1
            for mine, fresh in zip(found, call(), strict=True):
                for place, value in zip(mine, fresh, strict=True):
                    if place is not None:
                        place.copy_(value)

        return found, replay


def build(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    groups = [
        {"params": list(model[:2].parameters())},
        {"params": list(model[2].parameters()), "precondition": "diagonal"},
        {"params": list(model[3].parameters()), "precondition": None, "weight_decay": 0.1},
    ]
    options = {"lr": 0.01, "precondition": "spectral", "warmup_steps": 2, **options}
    return model, Neumann(groups, **options)


def use_graphs(optimizer, monkeypatch):
    graphs = Graphs(optimizer)
    monkeypatch.setattr(captured, "capture", graphs.capture)
    monkeypatch.setattr(optimizer, "_precondition", optimizer._captured.precondition)
    return graphs


def train(model, optimizer, steps, first=0, missing=()):
    for step in range(first, first + steps):
        torch.manual_seed(step)
        for number, p in enumerate(model.parameters()):
            p.grad = None if number in missing else torch.randn_like(p)
        optimizer.step()


def assert_equal(model, other):
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


OPTIONS = {
    "plain": {},
    "decay in the gradient": {"weight_decay": 0.1, "decoupled_weight_decay": False},
    "maximize": {"maximize": True},
    "bfloat16 state": {"state_dtype": torch.bfloat16},
    "slow momentum": {"precondition": Spectral(before=SlowMomentum(0.6, 0.9, 0.5, 4))},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_replayed_steps_are_those_without_a_graph(name, monkeypatch):
    (model, optimizer), (other, plain) = build(**OPTIONS[name]), build(**OPTIONS[name])
    graphs = use_graphs(optimizer, monkeypatch)
    for trained in ((model, optimizer), (other, plain)):
        train(*trained, ORDINARY_STEPS + 6)
    assert (graphs.captures, graphs.replays) == (1, 6)
    assert_equal(model, other)


def test_a_change_of_form_ends_the_graph(monkeypatch):
    """A missing gradient, another decay, a loaded state: ordinary steps, then a new graph."""
    (model, optimizer), (other, plain) = build(), build()
    graphs = use_graphs(optimizer, monkeypatch)
    ordinary, first = ORDINARY_STEPS, 0

    def train_both(steps, **options):
        nonlocal first
        train(model, optimizer, steps, first, **options)
        train(other, plain, steps, first, **options)
        first += steps
        assert_equal(model, other)

    train_both(ordinary + 2)
    assert (graphs.captures, graphs.replays) == (1, 2)
    train_both(2 * ordinary, missing=(2,))  # each time it waits longer
    assert graphs.replays == 2
    train_both(1, missing=(2,))
    assert (graphs.captures, graphs.replays) == (2, 3)
    for each in (optimizer, plain):
        each.param_groups[0]["weight_decay"] = 0.3
    train_both(4 * ordinary + 1)
    assert (graphs.captures, graphs.replays) == (3, 4)
    saved = copy.deepcopy(plain.state_dict())
    for each in (optimizer, plain):
        each.load_state_dict(copy.deepcopy(saved))
    use_graphs(optimizer, monkeypatch)
    train_both(ordinary + 2)


def test_a_learning_rate_that_changes_needs_no_new_graph(monkeypatch):
    (model, optimizer), (other, plain) = build(), build()
    graphs = use_graphs(optimizer, monkeypatch)
    for step in range(ORDINARY_STEPS + 4):
        for each, its_optimizer in ((model, optimizer), (other, plain)):
            for group in its_optimizer.param_groups:
                group["lr"] = 0.01 / (1 + step)
            train(each, its_optimizer, 1, step)
    assert graphs.captures == 1
    assert_equal(model, other)


def test_gradients_of_many_dtypes_and_a_loss_scale():
    """What changes from step to step is copied into the graph's own tensors."""
    weights = [nn.Parameter(torch.ones(4, 3, dtype=d)) for d in (torch.float32, torch.bfloat16)]
    optimizer = Neumann(weights, lr=0.1, precondition="spectral", warmup_steps=1)
    other = copy.deepcopy(optimizer)
    graphs = Graphs(optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "capture", graphs.capture)
        patch.setattr(optimizer, "_precondition", optimizer._captured.precondition)
        for step in range(ORDINARY_STEPS + 4):
            for each in (optimizer, other):
                torch.manual_seed(step)
                scale = torch.tensor(2.0**step)
                for p in each.param_groups[0]["params"]:
                    p.grad = scale.to(p) * torch.randn_like(p)
                each.grad_scale, each.found_inf = scale, torch.zeros(())
                each.step()
    assert graphs.replays == 4
    for ours, theirs in zip(weights, other.param_groups[0]["params"], strict=True):
        assert torch.equal(ours, theirs)


def test_a_capture_that_fails_is_reported_once_and_steps_go_on(monkeypatch):
    (model, optimizer), (other, plain) = build(), build()
    use_graphs(optimizer, monkeypatch)

    def fail(call):
        raise RuntimeError("operation not permitted\nmore")

    monkeypatch.setattr(captured, "capture", fail)
    train(model, optimizer, ORDINARY_STEPS)
    with pytest.warns(UserWarning, match=r"captured in a CUDA graph \(operation not permitted\)"):
        train(model, optimizer, 1, ORDINARY_STEPS)
    train(model, optimizer, 2, ORDINARY_STEPS + 1)
    train(other, plain, ORDINARY_STEPS + 3)
    assert_equal(model, other)


class Own:
    """A preconditioner that counts its calls in Python, which a graph would not repeat."""

    name = "own"

    def __init__(self):
        self.calls = 0

    def elementwise(self, parameter):
        return True

    def create(self, parameter):
        return {}

    def apply(self, gradients, states):
        self.calls += 1
        return list(gradients)


@pytest.mark.parametrize(
    "make",
    [
        lambda own: own,
        lambda own: Spectral(before=own),
        lambda own: Spectral(vectors=own),
        lambda own: Momentum(),  # there are no matrices
    ],
)
def test_what_is_not_captured(make, monkeypatch):
    own = Own()
    p = nn.Parameter(torch.ones(4, 3))
    optimizer = Neumann([p], lr=0.1, precondition=make(own), warmup_steps=1)
    assert not can_capture(optimizer._gather())
    graphs = use_graphs(optimizer, monkeypatch)
    for _ in range(6):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert graphs.captures == 0
    assert own.calls in (0, 6)


def test_a_copy_of_the_optimizer_has_no_graph(monkeypatch):
    model, optimizer = build()
    use_graphs(optimizer, monkeypatch)
    train(model, optimizer, ORDINARY_STEPS + 2)
    assert optimizer._captured._fixed is not None
    assert copy.deepcopy(optimizer._captured)._fixed is None


def test_a_capture_by_the_user_frees_the_copies_of_the_gradients(monkeypatch):
    model, optimizer = build()
    use_graphs(optimizer, monkeypatch)
    train(model, optimizer, ORDINARY_STEPS)
    assert optimizer._captured._fixed is not None
    monkeypatch.setattr(captured, "is_capturing", lambda: True)
    train(model, optimizer, 1, ORDINARY_STEPS)
    assert optimizer._captured._fixed is None


def test_a_capture_by_the_user_ends_those_by_the_optimizer(monkeypatch):
    model, optimizer = build()
    graphs = use_graphs(optimizer, monkeypatch)
    train(model, optimizer, 2)
    with monkeypatch.context() as patch:
        patch.setattr(captured, "is_capturing", lambda: True)
        train(model, optimizer, 1, 2)
    train(model, optimizer, 3 * ORDINARY_STEPS, 3)
    assert graphs.captures == 0


# ------------------------------------------------------------------ on a GPU


def build_on_gpu(**options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Flatten(), nn.Linear(2304, 768), nn.ReLU()
    )
    model.append(nn.Linear(768, 10))
    model = model.cuda().to(memory_format=torch.channels_last)
    optimizer, schedule = neumann.large_batch(model, steps=40, **options)
    return model, optimizer, schedule


def train_on_gpu(model, optimizer, schedule, steps, scaler=None):
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(16, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last)
        loss = model(x).square().mean()
        if scaler is not None and step == 6:
            loss = loss * torch.inf
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        schedule.step()
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_captured_steps_on_a_gpu(scaled, dtype, monkeypatch):
    """They are those of ordinary steps, also where one is skipped."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    found = []
    for capturable in (False, True):
        model, optimizer, schedule = build_on_gpu(capturable=capturable, state_dtype=dtype)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10) if scaled else None
        train_on_gpu(model, optimizer, schedule, 12, scaler)
        fixed = optimizer._captured._fixed
        assert (fixed is not None and fixed.graph is not None) == capturable
        found.append([p.detach().clone() for p in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("view", [False, True])
def test_gradients_in_another_layout_than_their_copies(view):
    """Not aligned, as in a bucket of DDP, or expanded: the graph needs no other kernels."""
    p = nn.Parameter(torch.ones(2048, 2048, device="cuda"))
    optimizer = Neumann([p], lr=0.01, precondition="spectral", capturable=True)
    bucket = torch.randn(10 + p.numel(), device="cuda")
    for _ in range(ORDINARY_STEPS + 3):
        whole = bucket[10:].view_as(p) if view else bucket[0].expand_as(p)
        p.grad = whole
        optimizer.step()
    assert optimizer._captured._fixed.graph is not None
    assert p.isfinite().all()


@pytest.mark.gpu
def test_after_a_capture_that_failed_torch_goes_on(monkeypatch):
    """A synchronization is not allowed in a capture."""
    p = nn.Parameter(torch.ones(64, 64, device="cuda"))
    optimizer = Neumann([p], lr=0.01, precondition="spectral", capturable=True)
    compute = captured.FixedStep._compute

    def wait(fixed):
        if captured.is_capturing():
            p.sum().item()
        return compute(fixed)

    monkeypatch.setattr(captured.FixedStep, "_compute", wait)
    stream = torch.cuda.current_stream()
    p.grad = torch.randn_like(p)
    for _ in range(ORDINARY_STEPS):
        optimizer.step()
    with pytest.warns(UserWarning, match="could not be captured"):
        optimizer.step()
    optimizer.step()
    assert torch.cuda.current_stream() == stream
    assert torch.rand(8, device="cuda").isfinite().all()
    other = torch.cuda.Stream()
    x = torch.ones(1000, device="cuda")
    x.record_stream(other)
    del x
    torch.cuda.synchronize()
    assert p.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("warm_up", [ORDINARY_STEPS, 11])
def test_a_capture_of_the_whole_step_holds_p_too(warm_up):
    model, optimizer, _ = build_on_gpu(capturable=True)
    x = torch.randn(16, 3, 8, 8, device="cuda")
    model(x).square().mean().backward()
    for _ in range(warm_up):
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    graph.replay()
    torch.cuda.synchronize()
    assert not any(map(torch.equal, before, model.parameters()))
    assert all(p.isfinite().all() for p in model.parameters())
