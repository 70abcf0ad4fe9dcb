"""SIGTERM and SIGINT: finish the step, save, leave.

While a network trains, the first signal only raises a flag that the loop reads between two steps
(`noticed`). A second one is not waited for: it does what it would have done without us. Where
nothing trains, SIGTERM unwinds as Ctrl-C does (`terminable`), so that whoever has to tidy up can.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(Exception):
    """The run was asked to stop, has saved a checkpoint, and can be resumed.

    The process exits with 128 plus the signal's number: 143 for SIGTERM, 130 for SIGINT.
    """

    def __init__(self, number: int, step: int) -> None:
        self._explain(number, f"after step {step}; --resume auto continues from there")

    def _explain(self, number: int, rest: str) -> None:
        self.number = number
        self.exit_code = 128 + number
        super().__init__(f"stopped by {signal.Signals(number).name} {rest}")


class ComparisonInterrupted(Interrupted):
    """The same of many trainings: those that have ended are kept, those under way were saved."""

    def __init__(self, number: int, ended: int, total: int, folder: Path) -> None:
        self.ended, self.total = ended, total
        self._explain(
            number,
            f"after {ended} of {total} trainings; the same command with --output {folder} goes on",
        )


class Terminated(KeyboardInterrupt):
    """SIGTERM, where no training notices it."""


class Flag:
    """Which signal has come, if one has."""

    number: int | None = None


def number_of(stop: KeyboardInterrupt) -> int:
    """The signal that raised it."""
    return signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT


@contextmanager
def noticed(*, patient: bool = False) -> Iterator[Flag]:
    """Raise the flag instead of an exception for the length of a block.

    Args:
        patient: pass over further signals: torchrun repeats to its processes what the terminal
            has sent them already, and one that left would leave the others waiting.
    """
    flag = Flag()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def handler(number: int, frame: FrameType | None) -> None:
        flag.number = number
        if patient:
            return
        for each, previous in before.items():
            signal.signal(each, previous)

    try:
        for number in SIGNALS:
            signal.signal(number, handler)
    except ValueError:  # not the main thread: nobody sends signals here
        yield flag
        return
    try:
        yield flag
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def terminable() -> Iterator[None]:
    """Raise Terminated at a SIGTERM for the length of a block."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, handler)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
