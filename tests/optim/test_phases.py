"""The timetable: where resets fall, what μ is, which coefficients a phase has."""

import pytest

from neumann.optim.phases import Phase, Timetable, choose_coefficients, momentum_at


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
    assert timetable.next_reset(2) is None


def test_an_interval_of_one_grows():
    assert resets(Timetable(0, 1, 2.0), 40) == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize("growth", [1.0, 1.1, 2.0])
def test_the_order_of_questions_does_not_matter(growth):
    far_first, in_order = Timetable(0, 4, growth), Timetable(0, 4, growth)
    far_first.next_reset(100_000)
    assert resets(far_first, 300) == resets(in_order, 300)


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
