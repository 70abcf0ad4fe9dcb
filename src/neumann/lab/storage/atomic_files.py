"""Writing files that are either complete or absent, whatever kills the process or fills the disk.

A process killed while it writes leaves a temporary file behind. To tell it from the file of a live
process, even on a shared disk where process ids mean nothing, a writer holds a lock (flock) on its
file, which the system drops when the writer dies. Windows does not remove a file that is open.
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

TEMPORARY_PREFIX, TEMPORARY_SUFFIX = ".aside-", ".tmp"
# Linux writes at most about 2 GiB per call. Smaller pieces also let a kill take effect sooner.
CHUNK_BYTES = 1 << 24

BINARY = getattr(os, "O_BINARY", 0)  # Windows would translate newlines without it


class StorageError(RuntimeError):
    """A file of a run cannot be written or read. The message is one line and names the file."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))  # a file name may contain line breaks


def describe_os_error(error: OSError) -> str:
    """Explain why the system refused, and for a full disk what to do about it."""
    text = error.strerror or str(error) or type(error).__name__
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        text += (
            ": free some space and run the same command again (neumann train: with --resume auto)"
        )
    return text


@contextlib.contextmanager
def explain_os_errors(kind: type[Exception], failure: str) -> Iterator[None]:
    """Turn an OSError into an error of this kind that says what failed and why, in one line."""
    try:
        yield
    except OSError as error:
        raise kind(f"{failure}: {describe_os_error(error)}") from error


def write_atomically(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Replace a file. A reader sees the old content or the new; on failure the old one stays."""
    descriptor, temporary = _create_temporary(path.parent)
    try:
        for part in parts:
            write_fully(descriptor, part)
        os.fsync(descriptor)
        if os.name == "nt":  # Windows does not rename an open file
            os.close(descriptor)
            descriptor = -1
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    finally:
        # Closing drops the lock, so it comes last: until then nobody takes the file for a leftover.
        if descriptor >= 0:
            os.close(descriptor)
    sync_folder(path.parent)


def write_fully(descriptor: int, part: bytes | memoryview) -> None:
    """Write all bytes, of which one call of the system may write only a part."""
    with memoryview(part).cast("B") as rest:
        done = 0
        while done < len(rest):
            written = os.write(descriptor, rest[done : done + CHUNK_BYTES])
            if written == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += written


def sync_folder(folder: Path) -> None:
    """Make renames in the folder survive a power cut."""
    if os.name == "nt":  # Windows cannot open a folder to flush it
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a folder. A kill is harmless there too.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of dead processes, and leave those of live ones."""
    for temporary in folder.glob(f"{TEMPORARY_PREFIX}*{TEMPORARY_SUFFIX}"):
        # It may be gone by now, belong to another user, or be locked by its writer.
        with contextlib.suppress(OSError):
            if os.name == "nt":
                temporary.unlink()  # refused while its writer has it open
                continue
            descriptor = os.open(temporary, os.O_RDWR)
            try:
                _lock(descriptor, wait=False)
                temporary.unlink()
            finally:
                os.close(descriptor)


def _create_temporary(folder: Path) -> tuple[int, Path]:
    while True:
        temporary = folder / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
        # 0o666 is what open() asks for: the umask decides who may read it.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o666)
        try:
            # On a file system without locks this fails, and so it does in remove_leftovers.
            with contextlib.suppress(OSError):
                _lock(descriptor, wait=True)
            # Another process may have taken it for a leftover before it was locked.
            if os.fstat(descriptor).st_nlink > 0:
                return descriptor, temporary
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        os.close(descriptor)


def _lock(descriptor: int, *, wait: bool) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
