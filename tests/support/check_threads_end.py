"""Run a program as `python [-m] PROGRAM ...` would; fail if it leaves threads running.

A thread of a process group that still runs when the interpreter shuts down may abort the process.
That is rare and happens on busy machines, so the tests count threads instead of waiting for it.
The threads of torch's backward pass (pt_autograd) do not count: torch starts them once and stops
them itself.
"""

import os
import runpy
import sys
import time
from pathlib import Path


def list_threads() -> list[str]:
    """The names of all threads but the main one and those of torch's backward pass."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except OSError:  # it has ended since
            continue
        if int(task.name) != os.getpid() and not name.startswith("pt_autograd"):
            names.append(name)
    return names


if __name__ == "__main__":
    program = sys.argv.pop(1)
    try:
        if program == "-m":
            runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    deadline = time.monotonic() + 2  # a thread that has ended is listed for another moment
    while (threads := list_threads()) and time.monotonic() < deadline:
        time.sleep(0.01)
    if threads:
        sys.exit(f"these threads are left: {', '.join(threads)}")
