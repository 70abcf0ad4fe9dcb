"""Warm-up and resets, from records with a line only every so many steps."""

import dataclasses

import pytest
from fake_records import PER_EPOCH, fake_run

from neumann.report.phases import Phases, phases_of
from neumann.report.runs import read_run


def phases(tmp_path, opt, **options):
    return phases_of(read_run(fake_run(tmp_path, opt, **options)))


@pytest.mark.parametrize("log_every", [1, 7, 1000])
def test_every_reset_is_found_however_seldom_the_lines(tmp_path, log_every):
    found = phases(tmp_path, "neumann:warmup_epochs=1,reset_epochs=0.25", log_every=log_every)
    # K = 5 steps, doubling: t = 1, 6, 16, 36, 76 after a warm-up of 20.
    assert found == Phases(20, (21, 26, 36, 56, 96))


def test_defaults(tmp_path):
    assert phases(tmp_path, "neumann", epochs=20) == Phases(100, (101, 301))


def test_options_in_steps_and_no_further_reset(tmp_path):
    found = phases(tmp_path, "neumann:warmup_epochs=0,reset_epochs=0")
    assert found == Phases(0, (1,))


def test_under_a_preconditioner_the_series_stands_by_itself(tmp_path):
    assert phases(tmp_path, "neumann:precondition=spectral", epochs=20) == Phases(0, (1,))


def test_during_the_warm_up(tmp_path):
    assert phases(tmp_path, "neumann", ended=2) == Phases(40, ())


def test_other_optimizers_have_none(tmp_path):
    assert phases(tmp_path, "sgd") is None


def test_what_the_lines_say_wins_over_the_options(tmp_path):
    """As where a scheduler changed the intervals: only resets next to a line are known."""
    run = read_run(fake_run(tmp_path, "neumann:warmup_epochs=1,reset_epochs=1", log_every=7))
    other = dataclasses.replace(run, config={**run.config, "opt": "neumann:reset_epochs=3"})
    assert phases_of(other) == Phases(20, (21, 41, 81), whole=False)
    unknown = dataclasses.replace(run, config={**run.config, "opt": "<b>:"})
    assert phases_of(unknown) == Phases(20, (21, 41, 81), whole=False)


def test_skipped_steps_shift_the_resets(tmp_path):
    run = read_run(fake_run(tmp_path, "neumann:warmup_epochs=1,reset_epochs=1", log_every=1))
    skipped = 3
    lines = []
    for line in run.lines:
        if line["step"] > 30:
            line = {**line, "step": line["step"] + skipped}
        lines.append(line)
    found = phases_of(dataclasses.replace(run, lines=tuple(lines)))
    assert found == Phases(PER_EPOCH, (21, 41 + skipped, 81 + skipped))
