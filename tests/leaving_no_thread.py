"""Run a program as `python [-m] PROGRAM ...` would; fail if it leaves threads behind.

A thread of a process group that is left when the interpreter goes down may abort the process; that
is rare, and happens on busy machines. So tests count threads, and do not wait for it.
"""

import os
import runpy
import sys

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
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        sys.exit(f"{threads} threads are left, not one")
