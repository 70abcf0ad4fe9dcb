"""The share of P in a training step, from the times of its parts."""

import sys

import pytest

from benchmarks.step import preconditioner_share
from benchmarks.step.preconditioner_share import PASSES, SPECTRAL, make_row
from benchmarks.step.step_tables import format_shares


def clocks(wall, gpu=()):
    return {"wall": list(wall), "gpu": list(gpu)}


def test_the_share_is_the_difference_of_two_steps_in_the_same_round():
    passes, plain = clocks([1000.0] * 3, [500.0] * 3), clocks([2.0, 2.0, 4.0], [1.0] * 3)
    row = make_row(SPECTRAL, clocks([7.0, 8.0, 11.0], [2.0] * 3), passes, plain, None)
    assert row["wall_share_quartiles"] == pytest.approx([0.0055, 0.006, 0.0065])
    assert row["gpu_share_quartiles"] == pytest.approx([0.002] * 3)
    table = format_shares([row, make_row(PASSES, passes, passes, plain, None)]).splitlines()
    assert table[2] == (
        "| step, spectral P | 8.00 [7.50, 9.50] | 0.60 [0.55, 0.65] | 2.00 [2.00, 2.00] "
        "| 0.20 [0.20, 0.20] |"
    )
    assert table[3].endswith("| 1000.00 [1000.00, 1000.00] |  | 500.00 [500.00, 500.00] |  |")


def test_a_part_that_failed_says_why():
    row = make_row(SPECTRAL, clocks([]), clocks([1.0]), clocks([1.0]), "OutOfMemoryError: no")
    assert row == {"part": SPECTRAL, "error": "OutOfMemoryError: no"}
    assert "| step, spectral P | OutOfMemoryError: no |  |  |  |" in format_shares([row])


@pytest.mark.slow
def test_a_few_micro_batches_stand_for_all(monkeypatch, capsys):
    """16 tokens are one micro-batch: of four, one is timed, and its time counts four times."""
    counted = []
    make_row = preconditioner_share.make_row

    def record(name, times, *rest):
        counted.append((name, times["wall"]))
        return make_row(name, times, *rest)

    built = []

    class Counted(preconditioner_share.TimedPasses):
        def __init__(self, *given):
            super().__init__(*given)
            built.append(self)

    monkeypatch.setattr(preconditioner_share, "TimedPasses", Counted)
    monkeypatch.setattr(preconditioner_share, "make_row", record)
    size = "--model gpt:width=32,depth=1,heads=1 --rows 2 --context 8 --vocabulary 50"
    small = f"--device cpu {size} --tokens 64 --measured 1 --seconds 0"
    monkeypatch.setattr(sys, "argv", ["preconditioner_share", *small.split()])
    preconditioner_share.main()
    assert dict(counted)[PASSES] == [4 * ms for ms in built[0].wall_ms]
    assert "forward and backward" in capsys.readouterr().out


def test_tokens_that_are_no_micro_batches_are_refused(monkeypatch):
    small = "--device cpu --tokens 100 --rows 2 --context 8"
    monkeypatch.setattr(sys, "argv", ["preconditioner_share", *small.split()])
    with pytest.raises(SystemExit, match="a multiple of 16"):
        preconditioner_share.main()
