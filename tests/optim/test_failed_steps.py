"""A step that fails changes nothing; one that was cut short in its update says so."""

import copy
import signal
import threading

import pytest
import torch
from torch import nn

from neumann import Neumann
from neumann.optim import interrupts
from neumann.optim.backends import reference
from neumann.optim.interrupts import run_uninterrupted
from tests.support.interrupts import count_positions, interrupt_at
from tests.support.oracle_runs import IMPLEMENTATIONS
from tests.support.small_model import STRONG, equal

EVERY = [
    pytest.param(name, marks=[pytest.mark.slow] if name == "triton" else [])
    for name in IMPLEMENTATIONS
]
ON_HOST = [name for name in IMPLEMENTATIONS if name != "triton"]
CUT_SHORT = "the last step was cut short.*load a checkpoint"


def build(implementation, steps=3, **options):
    """Two groups of tiny tensors, after some steps and with gradients for the next."""
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(n, dtype=torch.float64) for n in (3, 2)])
    flags = {**STRONG, **IMPLEMENTATIONS[implementation], **options}
    optimizer = Neumann(
        [{"params": [p]} for p in model], lr=0.1, warmup_steps=1, reset_steps=0, **flags
    )
    set_gradients(model)
    for _ in range(steps):
        optimizer.step()
        set_gradients(model)
    return model, optimizer


def set_gradients(model):
    for p in model:
        p.grad = p.detach().sin()


def contents(model, optimizer):
    """Copies of all that a failed step must leave alone."""
    optimizer._distance.finish()
    found = [p.detach().clone() for p in model]
    for p in model:
        state = optimizer.state[p]
        found += [state[key].clone() for key in sorted(state) if not key.startswith("precond")]
    return found


def count_calls(function, fail_at):
    calls = iter(range(1, 100))

    def counted(*arguments, **options):
        if next(calls) == fail_at:
            raise MemoryError("on purpose")
        return function(*arguments, **options)

    return counted


# ---------------------------------------------------------------------- before the update


def fail_in_the_closure(model, optimizer, patch):
    def closure():
        raise MemoryError("on purpose")

    return lambda: optimizer.step(closure)


def fail_on_an_option_of_the_second_group(model, optimizer, patch):
    patch.setitem(optimizer.param_groups[1], "lr", -1.0)
    return optimizer.step


def fail_on_a_sparse_gradient(model, optimizer, patch):
    model[1].grad = torch.ones(2, dtype=torch.float64).to_sparse()
    return optimizer.step


def fail_on_an_iterate_of_another_shape(model, optimizer, patch):
    wrong = torch.zeros(5, dtype=torch.float64)
    patch.setitem(optimizer.state[model[1]], "iterate", wrong)
    return optimizer.step


def fail_in_the_preconditioner_of_the_second_group(model, optimizer, patch):
    class Failing:
        name = "failing"

        def elementwise(self, parameter):
            return True

        def create(self, parameter):
            return {}

        def apply(self, gradients, states):
            raise MemoryError("on purpose")

    patch.setitem(optimizer.param_groups[1], "precondition", Failing())
    return optimizer.step


def fail_while_preparing_the_second_group(model, optimizer, patch):
    backend = optimizer._backend
    if hasattr(backend, "prepare_update"):
        patch.setattr(backend, "prepare_update", count_calls(backend.prepare_update, 2))
    else:  # scalars are the first launch, the update is the second
        patch.setattr(backend, "_prepare_launch", count_calls(backend._prepare_launch, 2))
    return optimizer.step


FAILURES = [
    fail_in_the_closure,
    fail_on_an_option_of_the_second_group,
    fail_on_a_sparse_gradient,
    fail_on_an_iterate_of_another_shape,
    fail_in_the_preconditioner_of_the_second_group,
    fail_while_preparing_the_second_group,
]


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize("failure", FAILURES)
def test_a_step_that_fails_before_its_update_changes_nothing(implementation, failure, monkeypatch):
    model, optimizer = build(implementation)
    other, twin = build(implementation)
    before = contents(model, optimizer)
    with monkeypatch.context() as patch:
        step = failure(model, optimizer, patch)
        with pytest.raises((MemoryError, ValueError, RuntimeError)):
            step()
    assert equal(contents(model, optimizer), before)
    assert optimizer.training
    for of, on in ((model, optimizer), (other, twin)):
        set_gradients(of)
        on.step()
    assert equal(contents(model, optimizer), contents(other, twin))


@pytest.mark.parametrize("implementation", EVERY)
def test_a_skipped_step_that_fails_is_not_counted(implementation, monkeypatch):
    model, optimizer = build(implementation, skip_nonfinite=True)
    model[0].grad[0] = torch.inf
    if not optimizer._backend.on_device:
        optimizer.step()
        assert optimizer.diagnostics().skipped == 1
        return
    fail_while_preparing_the_second_group(model, optimizer, monkeypatch)
    with pytest.raises(MemoryError):
        optimizer.step()
    assert optimizer.diagnostics().skipped == 0


def test_averages_stay_until_a_step_without_forces_succeeds(monkeypatch):
    model, optimizer = build("foreach")
    for group in optimizer.param_groups:
        group.update(cubic=0.0, repulsive=0.0)
    with monkeypatch.context() as patch:
        fail_while_preparing_the_second_group(model, optimizer, patch)
        with pytest.raises(MemoryError):
            optimizer.step()
    assert all("offset" in optimizer.state[p] for p in model)
    optimizer.step()
    assert not any("offset" in optimizer.state[p] for p in model)
    assert optimizer.diagnostics().distance == 0


# ---------------------------------------------------------------------- inside the update


def cut_short(model, optimizer, monkeypatch):
    """Let the update fail after the first group, or before its end on a device."""
    backend = optimizer._backend
    with monkeypatch.context() as patch:
        if hasattr(backend, "prepare_update"):
            real = backend.prepare_update

            def failing(index, *arguments):
                update = real(index, *arguments)
                return count_calls(update, 1) if index == 1 else update

            patch.setattr(backend, "prepare_update", failing)
        else:
            launch = backend._prepare_launch
            patch.setattr(  # the scalars are the launch at position -1
                backend, "_prepare_launch", lambda *a: count_calls(launch(*a), int(a[1] >= 0))
            )
        with pytest.raises(MemoryError):
            optimizer.step()


@pytest.mark.parametrize("implementation", EVERY)
def test_a_step_cut_short_is_remembered_until_a_checkpoint_is_loaded(implementation, monkeypatch):
    model, optimizer = build(implementation)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    optimizer.step()
    expected = contents(model, optimizer)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    set_gradients(model)
    cut_short(model, optimizer, monkeypatch)
    refused = [optimizer.step, optimizer.train, optimizer.eval, optimizer.state_dict]
    refused += [copy.deepcopy(optimizer).step]
    for method in refused:
        with pytest.raises(RuntimeError, match=CUT_SHORT) as caught:
            method()
        assert "\n" not in str(caught.value)
    bad = copy.deepcopy(saved[1])
    bad["param_groups"][0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr must be"):
        optimizer.load_state_dict(bad)
    with pytest.raises(RuntimeError, match=CUT_SHORT):
        optimizer.step()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    set_gradients(model)
    optimizer.step()
    assert equal(contents(model, optimizer), expected)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ON_HOST)
def test_an_interrupt_at_any_position_of_a_step(implementation):
    """Nothing has changed, or the whole step has happened, or the optimizer says it was cut.

    Every 13th position, and others in each implementation; the soak test visits all.
    """
    model, optimizer = build(implementation)
    before = contents(model, optimizer)
    other, twin = build(implementation)
    positions = count_positions(twin.step)
    after = contents(other, twin)
    outcomes = {"before": 0, "after": 0, "cut short": 0}
    handler = signal.getsignal(signal.SIGINT)
    for position in range(positions - ON_HOST.index(implementation), 0, -13):
        assert interrupt_at(position, optimizer.step)
        assert torch.is_grad_enabled()
        if optimizer._cut_short:
            outcomes["cut short"] += 1
            with pytest.raises(RuntimeError, match=CUT_SHORT):
                optimizer.step()
        elif equal(contents(model, optimizer), before):
            outcomes["before"] += 1
            continue
        else:
            outcomes["after"] += 1
            assert equal(contents(model, optimizer), after), position
        put_back(model, optimizer, before)
    assert signal.getsignal(signal.SIGINT) is handler
    assert outcomes["before"]
    assert outcomes["cut short"]
    optimizer.step()
    assert equal(contents(model, optimizer), after)


def put_back(model, optimizer, before):
    """As loading a checkpoint, and faster."""
    live = [p.detach() for p in model]
    for p in model:
        live += [value for _, value in sorted(optimizer.state[p].items())]
    for tensor, value in zip(live, before, strict=True):
        tensor.copy_(value)
    optimizer._cut_short = False
    optimizer._watch.remember()


# ---------------------------------------------------------------------- Ctrl-C


def test_control_c_waits_for_the_update(monkeypatch):
    model, optimizer = build("single")
    other, twin = build("single")
    twin.step()
    real = reference.update_single

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        real(*arguments)

    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(reference, "update_single", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert signal.getsignal(signal.SIGINT) is handler
    assert equal(contents(model, optimizer), contents(other, twin))
    set_gradients(model)
    optimizer.step()


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="not on Windows")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_handler_that_saves_waits_for_the_update_too(name):
    """As SLURM sends, or a cloud that takes its machine back."""
    model, optimizer = build("single")
    saved = []

    def save(number, frame):
        saved.append(optimizer.state_dict())
        raise TimeoutError("preempted")

    number = getattr(signal, name)
    before = signal.signal(number, save)
    update = reference.update_single

    def signalled(*arguments):
        signal.raise_signal(number)
        signal.raise_signal(number)
        update(*arguments)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "update_single", signalled)
            with pytest.raises(TimeoutError, match="preempted"):
                optimizer.step()
        assert signal.getsignal(number) is save
    finally:
        signal.signal(number, before)
    assert len(saved) == 1
    set_gradients(model)
    optimizer.step()


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="not on Windows")
def test_every_signal_that_was_held_back_is_delivered():
    seen = []

    def stop(number, frame):
        seen.append(number)
        raise TimeoutError("preempted")

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(TimeoutError, match="preempted") as caught:
            run_uninterrupted(raise_two_signals)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1]
    assert isinstance(caught.value.__context__, KeyboardInterrupt)


def raise_two_signals():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGUSR1)


def test_signals_are_left_alone_where_nothing_could_raise():
    seen = []

    def look():
        seen.append(signal.getsignal(signal.SIGINT))

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run_uninterrupted(look)
    finally:
        signal.signal(signal.SIGINT, before)
    thread = threading.Thread(target=run_uninterrupted, args=(look,))
    thread.start()
    thread.join()
    assert seen == [signal.SIG_IGN, before]


def test_an_error_of_the_update_comes_out_and_the_handler_comes_back():
    handler = signal.getsignal(signal.SIGINT)

    def fail():
        raise KeyError("on purpose")

    with pytest.raises(KeyError):
        run_uninterrupted(fail)
    assert signal.getsignal(signal.SIGINT) is handler


def test_control_c_during_an_update_that_fails_is_not_lost():
    def fail():
        signal.raise_signal(signal.SIGINT)
        raise MemoryError("on purpose")

    with pytest.raises(KeyboardInterrupt):
        run_uninterrupted(fail)


def test_setting_the_handler_is_fast():
    """Not through the functions of `signal`, which convert to enums and back in every step."""
    assert interrupts._set_handler is not signal.signal
    assert interrupts._get_handler is not signal.getsignal
