"""What a preconditioner remembers in bfloat16: its size, how it is rounded, and that it resumes."""

import copy

import pytest
import torch
from torch import nn

from neumann import Neumann
from neumann.optim.preconditioners import Momentum, SlowMomentum, Spectral
from neumann.optim.preconditioners.apply import precondition
from neumann.optim.preconditioners.narrow_memory import PERIOD, make_noise, widen
from tests.support.compiled import Compiled, whole
from tests.support.operations import count_operations
from tests.support.oracle_runs import IMPLEMENTATIONS
from tests.support.preconditioned import CLOCK, FORMS, network, trained, weights

NARROW = {"precondition": "spectral", "state_dtype": torch.bfloat16}
NO_FORCES = {"cubic": 0.0, "repulsive": 0.0, "warmup_steps": 0, "reset_steps": 0}


def past_of(optimizer):
    return [state["preconditioner_past"] for state in optimizer.state.values()]


def test_bfloat16_state_takes_four_bytes_per_weight_of_a_matrix():
    """m and P's momentum; the mean of squares of vectors stays in float32."""
    _, optimizer = trained(3, **NARROW)
    for p, state in optimizer.state.items():
        kept = {key: t for key, t in state.items() if t.numel() == p.numel() and t.numel() > 1}
        size = sum(tensor.element_size() for tensor in kept.values())
        assert size == (4 if p.ndim > 1 else 8), kept.keys()


def test_a_long_memory_stays_in_float32():
    """The noise of a hundred roundings adds up in it."""
    assert Momentum(0.8).narrow == SlowMomentum(0.8).narrow == ("past",)
    assert Momentum(0.99).narrow == SlowMomentum(0.99).narrow == ()
    options = {**NARROW, "precondition": Spectral(before=Momentum(0.99))}
    _, optimizer = trained(2, **options)
    assert {past.dtype for past in past_of(optimizer)} == {torch.float32}


def test_complex_memory_is_not_narrowed():
    p = nn.Parameter(torch.ones(3, 4, dtype=torch.complex64))
    optimizer = Neumann([p], 0.1, **NARROW)
    assert past_of(optimizer)[0].dtype is torch.complex64


def test_a_preconditioner_sees_float32():
    seen = []

    class Watched(Momentum):
        def apply(self, gradients, states):
            seen.extend(state["past"].dtype for state in states)
            return super().apply(gradients, states)

    trained(2, **{**NARROW, "precondition": Spectral(before=Watched())})
    assert set(seen) == {torch.float32}


# ------------------------------------------------------------------ rounding


STEPS, DECAY = 25, 0.8
EXPECTED = pytest.approx(1 - DECAY**STEPS, rel=1e-3)  # 0.996


def settle(optimizer, p, step):
    """The mean of b after some steps with the gradient 1 − DECAY; its limit is 1."""
    for _ in range(STEPS):
        p.grad = torch.full_like(p, 1 - DECAY)
        step()
    (past,) = past_of(optimizer)
    assert past.dtype is torch.bfloat16
    return float(past.double().mean())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_steady_gradients_take_the_momentum_to_its_limit(implementation):
    """Rounded to nearest it stops at 0.99, where a step changes it by less than half a unit."""
    p = nn.Parameter(torch.zeros(30, 40))
    options = {**NARROW, **NO_FORCES, **IMPLEMENTATIONS[implementation]}
    optimizer = Neumann([p], 0.01, **{**options, "precondition": Momentum(DECAY)})
    assert settle(optimizer, p, optimizer.step) == EXPECTED


@pytest.mark.usefixtures("fresh_compiler")
def test_so_do_compiled_steps():
    p = nn.Parameter(torch.zeros(30, 40))
    optimizer = Neumann([p], 0.01, **{**NARROW, **NO_FORCES, "precondition": Momentum(DECAY)})
    compiled = Compiled(optimizer.step, "eager")
    assert settle(optimizer, p, compiled) == EXPECTED
    assert whole(compiled)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_resumed_run_rounds_as_the_run_would_have(form):
    options = {**NARROW, **form}
    complete, expected = trained(12, **options)
    model, optimizer = trained(5, **options)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again = network(seed=1)
    again.load_state_dict(saved[0])
    torch.manual_seed(99)  # no random state takes part
    resumed = Neumann(again.named_parameters(), lr=0.5, **CLOCK, **options)
    resumed.load_state_dict(saved[1])
    trained(7, again, resumed, first=5)
    assert torch.equal(weights(again), weights(complete))
    assert all(map(torch.equal, past_of(resumed), past_of(expected)))


def in_channels_last(seed):
    """A network whose layout changes after the optimizer has made its state."""
    model = network(seed)
    optimizer = Neumann(model.named_parameters(), lr=0.01, **CLOCK, **NARROW)
    return model.to(memory_format=torch.channels_last), optimizer


def test_so_does_one_whose_weights_have_got_another_layout():
    complete, _ = trained(12, *in_channels_last(0))
    model, optimizer = trained(5, *in_channels_last(0))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again, resumed = in_channels_last(1)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    trained(7, again, resumed, first=5)
    assert torch.equal(weights(again), weights(complete))


def test_copies_are_rounded_alike_whatever_stands_beside_them():
    """As replicas beside shards that differ in size."""
    found = []
    for beside in (3, 50):
        other, p = nn.Parameter(torch.ones(beside, 2)), nn.Parameter(torch.ones(20, 30))
        optimizer = Neumann([other, p], 0.1, **NARROW)
        for _ in range(3):
            for each in (other, p):
                each.grad = torch.randn(each.shape, generator=torch.Generator().manual_seed(0))
            optimizer.step()
        found.append(past_of(optimizer)[1])
    assert torch.equal(*found)


def test_the_noise_is_uniform_and_differs_from_step_to_step():
    like = torch.empty(5000)
    first, second = (make_noise(torch.tensor(clock), like).double() for clock in (7, 8))
    assert first.min() >= 0
    assert first.max() < 1 << 16
    assert abs(float(first.mean()) / 65535 - 0.5) < 0.02
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.06


def rounded(values):
    kept = [torch.zeros_like(value, dtype=torch.bfloat16) for value in values]
    memory = widen(kept)
    torch._foreach_copy_(memory.wide, values)
    memory.write_back(torch.tensor(3))
    return kept


def test_what_bfloat16_can_hold_is_left_alone():
    values = torch.tensor([0.0, -0.0, 1.5, -3.0, 2.0**-130, torch.inf, -torch.inf])
    (kept,) = rounded([values])
    assert torch.equal(kept.float(), values)


def test_nan_does_not_become_a_number():
    """A GPU writes NaN with all bits set, to which noise cannot be added."""
    nan = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    (kept,) = rounded([nan])
    assert not kept.isfinite().any()


def test_long_tensors_and_all_layouts_are_rounded():
    generator = torch.Generator().manual_seed(0)
    values = [
        torch.rand(2 * PERIOD + 5, generator=generator) + 1,
        torch.rand(3, 4, 5, 6, generator=generator).to(memory_format=torch.channels_last) + 1,
        torch.rand(7, 8, generator=generator).mT + 1,
        torch.rand(0, 3),
    ]
    for value, kept in zip(values, rounded(values), strict=True):
        assert kept.stride() == value.stride()
        error = (kept.float() - value).abs()
        assert (error < 2**-7).all()
        if value.numel():
            assert error.max() > 2**-8  # to nearest it would not be


def test_rounding_takes_as_many_operations_for_many_tensors_as_for_few():
    """On a GPU each is a launch."""
    counts = []
    for number in (2, 9):
        parameters = [nn.Parameter(torch.randn(4, 6)) for _ in range(number)]
        optimizer = Neumann(parameters, lr=0.1, foreach=True, **NARROW)
        for p in parameters:
            p.grad = torch.randn_like(p)
        gathered = optimizer._gather()
        with torch.no_grad():
            counted = count_operations(lambda groups=gathered: precondition(groups, None, None))
        views = ("view", "as_strided", "slice", "split", "unbind", "detach")
        counts.append({k: n for k, n in counted.items() if not any(v in k for v in views)})
        assert counted["aten::_foreach_copy_"] == 2
    assert counts[0] == counts[1]
