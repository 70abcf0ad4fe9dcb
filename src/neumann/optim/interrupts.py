"""What Ctrl-C must not leave behind: half-written weights, and autograd switched off."""

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

# The C functions that `signal` wraps: the wrappers spend 10 µs or more converting to enums.
_fast: Any = sys.modules.get("_signal", signal)
_set_handler, _get_handler = _fast.signal, _fast.getsignal
_SIGINT = int(signal.SIGINT)


def run_uninterrupted(function: Callable[[], None]) -> None:
    """Run the function; a SIGINT that arrives meanwhile takes effect when it has ended.

    Writing weights takes milliseconds, and a mixture of old and new ones would be permanent. Only
    the main thread receives signals, and only a handler in Python can raise.
    """
    before = None
    if threading.current_thread() is threading.main_thread():
        before = _get_handler(_SIGINT)
    if not callable(before):
        function()
        return
    arrived: list[int] = []
    try:
        try:
            _set_handler(_SIGINT, lambda number, _: arrived.append(number))
            function()
        finally:
            _set_handler(_SIGINT, before)
    except BaseException:  # the function failed, or an interrupt came before the line above
        _set_handler(_SIGINT, before)
        if arrived:
            signal.raise_signal(signal.SIGINT)
        raise
    if arrived:
        signal.raise_signal(signal.SIGINT)


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
