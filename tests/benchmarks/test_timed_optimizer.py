"""Rounds in which optimizers measure their steps in turns."""

import time

import torch

from benchmarks.step import timed_optimizer
from benchmarks.step.timed_optimizer import LEAST_ROUNDS, TimedSteps, time_in_rounds


class Recorded(TimedSteps):
    """Writes down what it is asked for; its preparation takes longer than its step."""

    def __init__(self, name, calls, device="cpu", period=1):
        super().__init__(torch.device(device), period)
        self.name, self.calls = name, calls

    def prepare(self):
        time.sleep(0.01)
        self.calls.append(f"prepare {self.name}")

    def step(self):
        self.calls.append(f"step {self.name}")


def test_everyone_steps_once_a_round_in_a_changing_order():
    calls = []
    timed = [Recorded(name, calls) for name in "abc"]
    yielded = list(time_in_rounds(timed, seconds=0))
    assert [rounds for rounds, _ in yielded] == list(range(1, LEAST_ROUNDS + 1))
    steps = [call.split()[1] for call in calls if call.startswith("step")]
    orders = {"".join(steps[start : start + 3]) for start in range(0, len(steps), 3)}
    assert all(sorted(order) == list("abc") for order in orders)
    assert len(orders) > 1
    assert calls[::2] == [f"prepare {name}" for name in steps]
    assert all(len(entry.wall_ms) == LEAST_ROUNDS and not entry.gpu_ms for entry in timed)
    assert min(ms for entry in timed for ms in entry.wall_ms) < 5  # without the preparation


def test_rounds_go_on_until_the_time_is_up():
    *_, (rounds, passed) = time_in_rounds([Recorded("a", [])], seconds=0.2)
    assert rounds > LEAST_ROUNDS
    assert passed >= 0.2


def test_on_a_gpu_both_clocks_run(monkeypatch):
    delays = []

    def time_on_gpu(call, delay):
        call()
        delays.append(delay)
        return 3.0

    walls = iter(range(1000))  # seconds, so every step seems to take one
    monkeypatch.setattr(timed_optimizer, "read_clock", lambda device: next(walls))
    monkeypatch.setattr(timed_optimizer, "time_on_gpu", time_on_gpu)
    calls = []
    timed = [Recorded(name, calls, "cuda") for name in "ab"]
    *_, (rounds, _) = time_in_rounds(timed, seconds=0)
    assert all(entry.wall_ms == [1000.0] * rounds for entry in timed)
    assert all(entry.gpu_ms == [3.0] * rounds for entry in timed)
    assert calls[::2] == [call.replace("step", "prepare") for call in calls[1::2]]
    assert set(delays) == {timed_optimizer.LONGEST_DELAY_MS}


def test_both_clocks_see_each_step_of_a_period_equally_often(monkeypatch):
    """Every second step costs 3 instead of 1: each time is the mean, 2."""
    clock = [0.0]

    class Alternating(TimedSteps):
        steps = 0

        def step(self):
            self.steps += 1
            clock[0] += 1.0 if self.steps % 2 else 3.0

    def time_on_gpu(call, delay):
        start = clock[0]
        call()
        return clock[0] - start

    monkeypatch.setattr(timed_optimizer, "read_clock", lambda device: clock[0])
    monkeypatch.setattr(timed_optimizer, "time_on_gpu", time_on_gpu)
    entry = Alternating(torch.device("cuda"), period=2)
    *_, (rounds, _) = time_in_rounds([entry], seconds=0)
    assert entry.wall_ms == [2000.0] * rounds
    assert entry.gpu_ms == [2.0] * rounds


def test_one_that_fails_is_left_out_of_further_rounds():
    class Failing(Recorded):
        def step(self):
            super().step()
            raise MemoryError("too large\nby far")

        def release(self):
            self.calls.append("release")

    calls, own = [], []
    good, bad = Recorded("good", calls), Failing("bad", own)
    *_, (rounds, _) = time_in_rounds([bad, good], seconds=0)
    assert bad.error == "MemoryError: too large"
    assert own == ["prepare bad", "step bad", "release"]
    assert len(good.wall_ms) == rounds == LEAST_ROUNDS
    assert list(time_in_rounds([bad], seconds=0)) == []
