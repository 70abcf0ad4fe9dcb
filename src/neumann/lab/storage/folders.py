"""The folders of runs: their names, and the lock that keeps a second process out.

The operating system drops the lock when its holder dies, so a lock file left behind blocks nobody.
A folder in use is a UsageError. No lock is taken, silently, where the folder is read-only or its
file system has no locks. Other failures are OSErrors.

A folder may come from someone else, so we do not write through links inside it: `refuse_link`.
"""

import contextlib
import errno
import itertools
import os
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from neumann.lab.errors import UsageError

LOCK_NAME = ".lock"
LOCK_TIMEOUT = 2.0  # seconds; a process that was killed may take a moment to end
MAX_NAME_BYTES = 255  # of a file or folder name

_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


class FolderLock:
    """Reserves an existing folder for this process until it is released."""

    def __init__(self, folder: Path) -> None:
        self._path = Path(folder) / LOCK_NAME
        # Not thread-local: any thread may release it.
        self._lock = FileLock(self._path, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire(timeout=LOCK_TIMEOUT)
        except Timeout:
            raise UsageError(
                f"{folder} is in use by another process; wait for it, or choose another folder"
            ) from None
        except OSError as error:
            if error.errno not in _READ_ONLY + _NO_LOCKS:
                raise

    def release(self) -> None:
        if self._lock.is_locked:
            # Removed while still held: a process that waits for it notices and creates a new one.
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


def refuse_link(path: Path) -> None:
    """Raise a UsageError if a path inside a folder of records is a link to somewhere else."""
    if path.is_symlink():
        raise UsageError(
            f"{path} is a link to {os.readlink(path)}, and the lab writes only inside the folder "
            "that it is given; remove the link, or put the whole folder there"
        )


def make_folder_name(text: str) -> str:
    """Replace the characters that a folder name should not have."""
    return "".join(c if c.isalnum() or c in "-_.=," else "_" for c in text)


def new_run_folder(title: str) -> Path:
    """Return a path under runs/ that does not exist yet."""
    # Long names keep their end, where paths differ. A number follows.
    name = os.fsencode(make_folder_name(title))[-MAX_NAME_BYTES + 20 :].decode(errors="ignore")
    numbered = (Path("runs") / f"{name}-{number}" for number in itertools.count(1))
    return next(folder for folder in numbered if not folder.exists())
