"""Interrupts at chosen bytecode positions: Ctrl-C at every point where Python could see one.

A tracer counts the bytecode instructions that run inside the package and inside `contextlib`, and
raises KeyboardInterrupt before a chosen one. Real signals arrive at some of these positions only.
Code of torch and of the tests is not interrupted.
"""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import neumann

PLACES = (str(Path(neumann.__file__).parent), contextlib.__file__)


def interrupt_at(position: int, function: Callable[..., Any], *args: Any, **options: Any) -> bool:
    """Call the function with a KeyboardInterrupt at this position, counted from 1.

    Returns whether the interrupt came out of the function; any other exception passes through.
    When this returns, the interrupt's traceback is gone, and with it the frames that it kept alive.
    """
    tracer = _Tracer(position)
    try:
        tracer.run(function, *args, **options)
    except KeyboardInterrupt:
        return True
    return False


def count_positions(function: Callable[..., Any], *args: Any, **options: Any) -> int:
    """Call the function, and return at how many positions it could have been interrupted."""
    tracer = _Tracer(0)
    tracer.run(function, *args, **options)
    return tracer.count


class _Tracer:
    def __init__(self, position: int) -> None:
        self.position = position
        self.count = 0

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        before = sys.gettrace()
        sys.settrace(self.enter_frame)
        try:
            function(*args, **options)
        finally:
            sys.settrace(before)

    def enter_frame(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PLACES):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self.count_instruction

    def count_instruction(self, frame: Any, event: str, _: Any) -> Any:
        if event == "opcode":
            self.count += 1
            if self.count == self.position:
                raise KeyboardInterrupt
        return self.count_instruction
