"""SIGTERM and SIGINT: finish the step, save, leave.

The first signal only raises a flag that the loop reads between two steps. A second one is not
waited for: it does what it would have done without us.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(Exception):
    """The run was asked to stop, has saved a checkpoint, and can be resumed.

    The process exits with 128 plus the signal's number: 143 for SIGTERM, 130 for SIGINT.
    """

    def __init__(self, number: int, step: int) -> None:
        self.exit_code = 128 + number
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name} after step {step}; --resume auto continues from there")


class Flag:
    """Which signal has come, if one has."""

    number: int | None = None


@contextmanager
def noticed() -> Iterator[Flag]:
    """Raise the flag instead of an exception for the length of a block."""
    flag = Flag()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def handler(number: int, frame: FrameType | None) -> None:
        flag.number = number
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
