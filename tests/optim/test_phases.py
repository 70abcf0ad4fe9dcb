"""The timetable: where resets fall, what μ is, which coefficients a phase has."""

import sys
import threading

import pytest
import torch

from neumann import Neumann
from neumann.optim import phases
from neumann.optim.phases import Phase, Timetable, choose_coefficients, momentum_at, reset_table


def resets(timetable: Timetable, until: int) -> list[int]:
    warmup = timetable.warmup_steps
    return [t for t in range(1, until) if timetable.place(warmup + t).phase is Phase.RESET]


def test_warmup_comes_first_and_counts_from_one():
    timetable = Timetable(3, 10, 2.0)
    assert [timetable.place(step).phase for step in (1, 2, 3)] == [Phase.WARMUP] * 3
    assert timetable.place(3).t == 0
    assert timetable.place(4) == (Phase.RESET, 1)
    assert timetable.place(5) == (Phase.ITERATE, 2)


def test_intervals_double():
    assert resets(Timetable(5, 10, 2.0), 200) == [1, 11, 31, 71, 151]


def test_growth_one_is_the_printed_modulo():
    assert resets(Timetable(0, 7, 1.0), 40) == [t for t in range(1, 40) if t % 7 == 1]


def test_fractional_growth_rounds_half_up():
    # 3, 4.5 → 5, 6.75 → 7, 10.125 → 10
    assert resets(Timetable(0, 3, 1.5), 30) == [1, 4, 9, 16, 26]


def test_no_interval_means_one_reset():
    timetable = Timetable(2, 0, 2.0)
    assert resets(timetable, 500) == [1]
    assert timetable.next_reset(1) == 1
    assert timetable.next_reset(2) is None


def test_an_interval_of_one_grows():
    assert resets(Timetable(0, 1, 2.0), 40) == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize("growth", [1.0, 1.1, 2.0])
def test_the_order_of_questions_does_not_matter(growth):
    far_first, in_order = Timetable(0, 4, growth), Timetable(0, 4, growth)
    far_first.next_reset(100_000)
    assert resets(far_first, 300) == resets(in_order, 300)


def test_threads_that_ask_at_once_get_the_same_table():
    """Nothing in a shared table can be changed, and none is seen half made."""
    times, _ = reset_table(4, 1.01)
    assert isinstance(times, tuple)
    expected = resets(Timetable(0, 4, 1.01), 3000)
    failures = []

    def ask(start):
        try:
            timetable = Timetable(0, 4, 1.01)
            timetable.next_reset(10 ** (1 + start % 9))
            assert resets(timetable, 3000) == expected
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(3):
            phases._compute_reset_table.cache_clear()
            workers = [threading.Thread(target=ask, args=(start,)) for start in range(8)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures


def test_the_largest_growth_does_not_overflow():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = Neumann([p], 0.1, warmup_steps=0, reset_steps=4, reset_growth=1e308, foreach=False)
    for _ in range(12):
        p.grad = torch.ones(2)
        optimizer.step()
    assert resets(Timetable(0, 4, 1e308), 100) == [1, 5]
    assert optimizer.diagnostics().steps_to_reset is None
    assert torch.isfinite(p).all()


def test_momentum_starts_at_half_and_peaks():
    assert momentum_at(0, 0.9) == 0.0
    assert momentum_at(1, 0.9) == 0.5
    assert momentum_at(8, 0.9) == pytest.approx(8 / 9)
    assert momentum_at(9, 0.9) == pytest.approx(0.9)
    assert momentum_at(1000, 0.9) == 0.9
    assert momentum_at(1000, 0.3) == 0.3


def test_coefficients_of_each_phase():
    assert choose_coefficients(Phase.WARMUP, 0.1, 0.9, 0.99, 0.0) == (1, 0, 0, 0.1, 0, 1, 0, 0, 1)
    assert choose_coefficients(Phase.RESET, 0.1, 0.9, 0.99, 0.5) == (0, 0.1, 0, 0, 0, 1, 0, 0, 1)
    assert choose_coefficients(Phase.ITERATE, 0.1, 0.9, 0.99, 0.5) == (
        0.9,
        0.1,
        0.9,
        0.1,
        0.05,
        0.99,
        0,
        0,
        1,
    )
