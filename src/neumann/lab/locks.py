"""One process at a time in a folder.

A claim is a lock (flock) on the file `.lock` in the folder. The kernel drops it when its holder
dies, however it dies; a file left behind then says nothing. Let go, the file is removed.

A folder that somebody else holds is a UsageError, after a moment in which a process that was just
killed may end. Where nothing can be written, and on file systems without locks, there is no lock to
take and nothing is said. Other failures are OSErrors.
"""

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self
from weakref import WeakSet

from neumann.lab.errors import UsageError

LOCK = ".lock"
PATIENCE = 2.0  # seconds in which a process that was killed may end
LOOK = 0.05  # seconds between two tries

_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


class Claim:
    """A folder, which has to be there, for this process alone until it is released."""

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = None
        self._path = Path(folder) / LOCK
        self._take()
        _claims.add(self)

    def release(self) -> None:
        """Let others have the folder; a second time is nothing."""
        if self._descriptor is not None:
            # Removed while it is held: whoever waits for it finds that it is gone, and makes one.
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._let_go()

    def _take(self) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                if error.errno in _READ_ONLY:
                    return
                raise
            self._descriptor = descriptor
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._let_go()
                if time.monotonic() >= end:
                    raise UsageError(
                        f"{self._path.parent} is in use by another process; wait for it, or choose "
                        "another folder"
                    ) from None
                time.sleep(LOOK)
            except OSError:  # no locks here
                return
            else:
                if _is_at(descriptor, self._path):
                    return
                self._let_go()  # of a file that its holder has removed

    def _let_go(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


_claims: WeakSet[Claim] = WeakSet()


def _forget() -> None:
    """In a forked process: the claims are its parent's, and must not outlive it here."""
    for claim in list(_claims):
        claim._let_go()


os.register_at_fork(after_in_child=_forget)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
