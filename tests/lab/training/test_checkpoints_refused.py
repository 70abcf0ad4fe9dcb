"""When the system refuses (full disk, no permission): one line, and old checkpoints stay."""

import errno
import os
import resource
import signal
import stat
import subprocess
import sys

import pytest

from neumann.lab.storage import atomic_files
from neumann.lab.training.checkpoints import CheckpointError, Checkpoints
from tests.support.checkpointing import consistent, names, payload
from tests.support.processes import PROCESS_TIMEOUT


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["write", "short write", "fsync", "replace"])
def test_a_full_disk_is_one_line_and_the_old_checkpoints_stay(call, code, tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, payload(step))
    before = names(tmp_path)
    write = os.write
    calls = []

    def refuse(*arguments):
        calls.append(arguments)
        if call == "short write" and len(calls) == 1:
            return write(arguments[0], arguments[1][:100])
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call.split()[-1], refuse)
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save(3, payload(3))
    message = str(caught.value)
    assert "\n" not in message
    assert "checkpoint-000000000003.pt" in message
    assert os.strerror(code) in message
    assert ("free some space" in message) == (code != errno.EIO)
    assert names(tmp_path) == before
    assert checkpoints.load_latest().step == 2
    checkpoints.save(3, payload(3))
    assert checkpoints.load_latest().step == 3


def test_short_writes_are_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:997]))
    Checkpoints(tmp_path).save(1, payload(1))
    assert consistent(Checkpoints(tmp_path).load_latest())


def test_a_write_of_zero_bytes_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "write", lambda descriptor, data: 0)
    with pytest.raises(CheckpointError, match="No space left"):
        Checkpoints(tmp_path).save(1, payload(1))


def test_a_file_above_the_size_limit(tmp_path):
    """The kernel itself takes a part and refuses the rest, as on a full disk."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, payload(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        with pytest.raises(CheckpointError, match="File too large"):
            checkpoints.save(2, payload(2, size=100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert names(tmp_path) == ["checkpoint-000000000001.pt"]
    assert checkpoints.load_latest().step == 1


SMALL_DISK = """
import sys, torch
from pathlib import Path
from neumann.lab.training.checkpoints import CheckpointError, Checkpoints
checkpoints = Checkpoints(Path(sys.argv[1]))
checkpoints.save(1, {"x": torch.ones(20_000)})
try:
    checkpoints.save(2, {"x": torch.ones(200_000)})
except CheckpointError as error:
    assert "No space left on device: free some space" in str(error), error
assert [path.name for path in Path(sys.argv[1]).iterdir()] == ["checkpoint-000000000001.pt"]
checkpoints.save(3, {"x": torch.ones(20_000)})
assert checkpoints.load_latest().step == 3
print("passed")
"""


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path):
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = f"mount -t tmpfs -o size=256k none {tmp_path}"
    try:
        usable = subprocess.run([*namespace, "sh", "-c", mount], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        usable = None
    if usable is None or usable.returncode:
        pytest.skip("mounting a small disk needs a user namespace, which is not allowed here")
    script = [sys.executable, "-c", SMALL_DISK, str(tmp_path)]
    done = subprocess.run(
        [*namespace, "sh", "-c", f'{mount} && exec "$@"', "sh", *script],
        capture_output=True,
        text=True,
        timeout=PROCESS_TIMEOUT,
    )
    assert done.stdout == "passed\n", done.stderr


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot save .*/file/.*: (File|Not a directory)"):
        Checkpoints(tmp_path / "file").save(1, payload(1))
    with pytest.raises(CheckpointError, match=r"cannot read .*/file: Not a directory"):
        Checkpoints(tmp_path / "file").load_latest()
    path = Checkpoints(tmp_path).save(1, payload(1))
    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "_create_temporary", refuse)
        with pytest.raises(CheckpointError, match=r"cannot save .*: Permission denied"):
            Checkpoints(tmp_path).save(2, payload(2))
    with monkeypatch.context() as patch:
        patch.setattr(type(path), "read_bytes", refuse)
        with pytest.raises(CheckpointError, match=r"cannot read .*-000000000001.pt: Permission"):
            Checkpoints(tmp_path).load_latest()
    assert consistent(Checkpoints(tmp_path).load_latest())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(tmp_path):
    Checkpoints(tmp_path).save(1, payload(1))
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        with pytest.raises(CheckpointError, match="Permission denied"):
            Checkpoints(tmp_path).save(2, payload(2))
        assert Checkpoints(tmp_path).load_latest().step == 1
    finally:
        tmp_path.chmod(stat.S_IRWXU)


def test_the_umask_decides_who_may_read_a_checkpoint(tmp_path):
    before = os.umask(0o027)
    try:
        path = Checkpoints(tmp_path).save(1, payload(1))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_read_error_counts_as_damage(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        path = checkpoints.save(step, payload(step))
    read = type(path).read_bytes

    def refuse(self):
        if self == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(self)

    monkeypatch.setattr(type(path), "read_bytes", refuse)
    assert checkpoints.load_latest().damaged == (path,)


def test_a_link_to_nowhere_counts_as_damage(tmp_path):
    """It is not a file that another process removes, which is looked for again."""
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        path = checkpoints.save(step, payload(step))
    path.unlink()
    path.symlink_to("nowhere")
    found = checkpoints.load_latest()
    assert (found.step, found.damaged) == (1, (path,))
    assert not checkpoints.is_intact(2)
    with pytest.raises(CheckpointError, match=r"-000000000002.pt is damaged"):
        checkpoints.load_step(2)
