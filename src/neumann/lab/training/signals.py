"""SIGTERM and SIGINT: finish the step, save, exit.

While a network trains, the first signal is only noted, and the loop reads it between two steps; a
second one acts as usual. Where nothing trains, SIGTERM unwinds the stack like Ctrl-C.
"""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
Handler = Callable[[int, FrameType | None], None]


class Interrupted(Exception):
    """A run was asked to stop, has saved a checkpoint, and can be resumed."""

    def __init__(self, number: int, progress: str) -> None:
        self.number = number
        self.exit_code = 128 + number
        super().__init__(f"stopped by {signal.Signals(number).name} {progress}")


class Terminated(KeyboardInterrupt):
    """SIGTERM outside a training run."""


class ReceivedSignal:
    number: int | None = None


def signal_number(stop: KeyboardInterrupt) -> int:
    return signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT


@contextmanager
def catch_signals(*, repeatedly: bool = False) -> Iterator[ReceivedSignal]:
    """Note the first signal instead of raising an exception, or with `repeatedly` every signal.

    torchrun forwards to its processes what the terminal has sent them already, and one that exited
    would leave the others waiting.
    """
    received = ReceivedSignal()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def handler(number: int, frame: FrameType | None) -> None:
        received.number = number
        if not repeatedly:
            for each, previous in before.items():
                signal.signal(each, previous)

    with _install(handler, SIGNALS):
        yield received


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    def handler(number: int, frame: FrameType | None) -> None:
        raise Terminated

    with _install(handler, [signal.SIGTERM]):
        yield


@contextmanager
def _install(handler: Handler, numbers: Iterable[int]) -> Iterator[None]:
    """Handle signals in the main thread, which alone receives them, until the block ends."""
    before = {}
    try:
        with suppress(ValueError):  # not the main thread
            for number in numbers:
                before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
