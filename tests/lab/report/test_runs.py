"""Runs as their records show them: times, gaps, and the phases of Neumann."""

import dataclasses
import math

import pytest

from neumann.lab.report.runs import Phases, read_run, to_number
from tests.support.fake_records import PER_EPOCH, fake_run


def read_phases(folder, opt, **options):
    return read_run(fake_run(folder, opt, **options)).phases


def test_times_between_epochs_are_interpolated(tmp_path):
    run = read_run(fake_run(tmp_path))
    assert run.seconds_at(PER_EPOCH // 2) == pytest.approx(0.25)
    assert run.seconds_at(7 * PER_EPOCH) == pytest.approx(3.5)
    assert math.isnan(read_run(fake_run(tmp_path / "new", ended=0)).seconds_at(5))


def test_what_is_not_a_number_is_a_gap():
    for value in (None, math.inf, True, "far", 1e300):
        assert math.isnan(to_number(value))
    assert to_number(3) == 3.0


@pytest.mark.parametrize("log_every", [1, 7, 1000])
def test_the_recorded_timetable_gives_every_reset(tmp_path, log_every):
    opt = "neumann:warmup_epochs=1,reset_epochs=0.25"
    # K = 5 steps, doubling: t = 1, 6, 16, 36, 76 after a warm-up of 20.
    expected = Phases(20, (21, 26, 36, 56, 96))
    assert read_phases(tmp_path, opt, log_every=log_every) == expected


def test_phases_by_default(tmp_path):
    assert read_phases(tmp_path, "neumann", epochs=20) == Phases(100, (101, 301))


def test_a_preconditioned_run_neither_warms_up_nor_resets_again(tmp_path):
    found = read_phases(tmp_path, "neumann:precondition=spectral", epochs=20)
    assert found == Phases(0, ())


def test_phases_end_at_the_last_recorded_step(tmp_path):
    assert read_phases(tmp_path / "warming up", "neumann", ended=2) == Phases(40, ())
    assert read_phases(tmp_path / "only begun", "neumann", ended=0) is None


def test_other_optimizers_have_no_phases(tmp_path):
    assert read_phases(tmp_path, "sgd") is None


def test_without_a_timetable_the_lines_give_what_they_mention(tmp_path):
    """Older records: only the first reset after each line is known, and where the warm-up ended."""
    often = "neumann:warmup_epochs=1,reset_epochs=1"
    found = read_phases(tmp_path / "a", often, timetable=False)
    assert found == Phases(20, (21, 41, 81), complete=False)
    seldom = "neumann:warmup_epochs=1,reset_epochs=0.1,reset_growth=1"
    found = read_phases(tmp_path / "b", seldom, timetable=False, log_every=1000, epochs=3)
    assert found == Phases(20, (21, 41), complete=False)
    warming_up = read_phases(tmp_path / "c", "neumann", timetable=False, ended=2)
    assert warming_up == Phases(40, (), complete=False)


@pytest.mark.parametrize("timetable", [True, False])
def test_skipped_steps_shift_the_resets(tmp_path, timetable):
    """The optimizer's clock omits the steps it skipped; places on the page are steps of the run."""
    opt = "neumann:warmup_epochs=1,reset_epochs=1"
    run = read_run(fake_run(tmp_path, opt, log_every=1, timetable=timetable))
    skipped = 3
    lines = [
        {**line, "step": line["step"] + skipped} if line["step"] > 30 else line
        for line in run.lines
    ]
    found = dataclasses.replace(run, lines=tuple(lines)).phases
    assert found == Phases(PER_EPOCH, (21, 41 + skipped, 81 + skipped), complete=timetable)
