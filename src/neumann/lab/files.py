"""Files that are either whole or not there, whatever kills the process or fills the disk.

`write_aside` writes into a temporary file in the same folder, flushes it to the disk, renames it
and flushes the folder: a reader sees the old content or the new, never a part. The temporary file
is locked (flock) while it is written. A killed process drops its lock, so `remove_leftovers` can
tell what it left behind from what somebody is writing right now, also on a shared disk where
process numbers say nothing. Needs POSIX. Failures are OSErrors, with the file that stood there
before intact and the temporary file removed.
"""

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = ".aside-"
SUFFIX = ".tmp"
# One write takes at most about 2 GiB on Linux; smaller ones also keep a kill from waiting long.
CHUNK = 1 << 24  # bytes


class StorageError(RuntimeError):
    """A file of a run cannot be written or read; the message is one line and names it."""


def reason(error: OSError) -> str:
    """Why the system refused, in its words; for a full disk with what to do about it."""
    text = error.strerror or str(error) or type(error).__name__
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        again = "run the same command again (neumann train: with --resume auto)"
        return f"{text}: free some space and {again}"
    return text


def write_aside(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Put the parts, one after the other, into a file at the path, replacing what stood there."""
    descriptor, aside = _create(path.parent)
    try:
        try:
            for part in parts:
                write_all(descriptor, part)
            os.fsync(descriptor)
            os.replace(aside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise
    finally:
        # Closing drops the lock; only now may others take the temporary file for a leftover.
        os.close(descriptor)
    sync_folder(path.parent)


def write_all(descriptor: int, part: bytes | memoryview) -> None:
    """Write all of the part: the system may take less at a time, as when the disk gets full."""
    with memoryview(part).cast("B") as rest:
        done = 0
        while done < len(rest):
            written = os.write(descriptor, rest[done : done + CHUNK])
            if written == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += written


def sync_folder(folder: Path) -> None:
    """Make renames and removals in the folder outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot do it; a kill is harmless there too.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of processes that died; those of a live one stay."""
    for aside in folder.glob(f"{PREFIX}*{SUFFIX}"):
        # Gone meanwhile, not ours, or locked by its writer: nothing to do about it.
        with contextlib.suppress(OSError), _opened(aside) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            aside.unlink()


def _create(folder: Path) -> tuple[int, Path]:
    """A new locked temporary file: its descriptor and path."""
    while True:
        aside = folder / f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}"
        # As open() does: readable by whom the umask lets read.
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            # A file system without locks takes none here; remove_leftovers then gets none either.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Somebody may have taken it for a leftover before it was locked.
            if os.fstat(descriptor).st_nlink > 0:
                return descriptor, aside
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                aside.unlink()
            raise
        os.close(descriptor)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
