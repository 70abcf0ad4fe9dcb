"""Ctrl-C waits while weights are being written: that takes milliseconds, a mixture is for good."""

import signal
import threading
from collections.abc import Callable
from typing import Any

# The functions below those of `signal`, which spend 10 µs or more on turning values into enums.
_set_handler: Any = getattr(signal.signal, "__wrapped__", signal.signal)
_get_handler: Any = getattr(signal.getsignal, "__wrapped__", signal.getsignal)


def run_uninterrupted(function: Callable[[], None]) -> None:
    """Run the function; a SIGINT that arrives meanwhile takes effect when it has ended.

    Only the main thread receives signals, and only a handler in Python can raise.
    """
    before = None
    if threading.current_thread() is threading.main_thread():
        before = _get_handler(signal.SIGINT)
    if not callable(before):
        function()
        return
    arrived: list[int] = []
    try:
        try:
            _set_handler(signal.SIGINT, lambda number, _: arrived.append(number))
            function()
        finally:
            _set_handler(signal.SIGINT, before)
    except BaseException:
        _set_handler(signal.SIGINT, before)
        raise
    if arrived:
        signal.raise_signal(signal.SIGINT)
