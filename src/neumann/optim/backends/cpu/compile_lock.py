"""A lock between the processes of a user that compile the CPU kernel.

Two processes that write numba's cache at once can give two specializations the same file, and a
third that loads it would run code for other dtypes. So they take turns. A process that cannot get
the lock compiles without the cache. A lock that another process never releases, a folder or a link
in its place and a read-only file system therefore cost time and a warning, nothing else.

The lock file is in NUMBA_CACHE_DIR or in the user's cache directory, where only the user can write.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from neumann.caller_warnings import warn_caller

if TYPE_CHECKING:
    from filelock import FileLock

TIMEOUT = 60.0  # seconds; compiling one specialization takes about one
NAME = "neumann-numba.lock"

_failed = False  # whether a turn was missed: this process does not wait again
_seconds = 0.0  # inside turns


def count_seconds() -> float:
    """How long this process has waited for the compiler so far, its turns included."""
    return _seconds


@contextmanager
def take_turn() -> Iterator[bool]:
    """Hold the lock inside the block; False: there is none, so leave the cache alone."""
    global _failed, _seconds
    lock, started = None, time.perf_counter()
    if not _failed:
        try:
            lock = _acquire()
        except Exception as error:  # whatever it is, compiling works without a lock
            _failed = True
            reason = " ".join(str(error).split())
            warn_caller(
                f"cannot lock numba's cache ({reason}), so this process compiles the fused step "
                "for itself; set NUMBA_CACHE_DIR to a folder that you can write",
            )
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.release()
        _seconds += time.perf_counter() - started


def _acquire() -> "FileLock":
    path = find_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.is_symlink():  # opening it would empty what it points to
        raise OSError(f"{path} is a link")
    from filelock import FileLock

    lock = FileLock(path)
    lock.acquire(timeout=TIMEOUT)
    return lock


def find_path() -> Path:
    """Where the lock is: beside numba's cache, or in the user's cache directory."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return Path(chosen) / NAME
    if sys.platform == "win32":
        own = os.environ.get("LOCALAPPDATA")
        folder = Path(own) if own else Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Caches"
    else:
        own = os.environ.get("XDG_CACHE_HOME")
        folder = Path(own) if own else Path.home() / ".cache"
    return folder / "neumann" / NAME
