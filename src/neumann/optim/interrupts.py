"""What a signal must not leave behind: half-written weights, and autograd switched off."""

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

# The C functions that `signal` wraps: the wrappers spend 10 µs or more converting to enums.
_fast: Any = sys.modules.get("_signal", signal)
_set_handler, _get_handler = _fast.signal, _fast.getsignal
# Those that end or preempt a run, or make it save; Windows lacks most.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGBREAK")
_SIGNALS = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))


def run_uninterrupted(function: Callable[[], None]) -> None:
    """Run the function; signals that arrive meanwhile take effect when it has ended.

    Writing weights takes milliseconds, and a mixture of old and new ones would be permanent. Only
    the main thread receives signals, and only a handler in Python can raise.
    """
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        found = ((number, _get_handler(number)) for number in _SIGNALS)
        before = {number: handler for number, handler in found if callable(handler)}
    if not before:
        function()
        return
    arrived: list[int] = []
    try:
        try:
            _set_all(dict.fromkeys(before, lambda number, _: arrived.append(number)))
            function()
        finally:
            _set_all(before)
    except BaseException:  # the function failed, or an interrupt came before the line above
        _set_all(before)
        _raise_all(list(dict.fromkeys(arrived)))
        raise
    _raise_all(list(dict.fromkeys(arrived)))


def _set_all(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        _set_handler(number, handler)


def _raise_all(numbers: list[int]) -> None:
    """Deliver signals that were held back, all of them even if a handler raises."""
    try:
        while numbers:
            signal.raise_signal(numbers.pop(0))
    finally:
        if numbers:
            _raise_all(numbers)


def run_with_grad_mode(enabled: bool, function: Callable[[], None]) -> None:
    """Run the function with autograd on or off, and restore the mode whatever happens.

    A `with` block does not: an interrupt inside torch's `__enter__` never reaches `__exit__`.
    """
    before = torch.is_grad_enabled()
    try:
        try:
            torch._C._set_grad_enabled(enabled)
            function()
        finally:
            torch._C._set_grad_enabled(before)
    except BaseException:  # an interrupt may have come before the line above
        torch._C._set_grad_enabled(before)
        raise
