"""Processes killed while they save, or saving at once: the newest checkpoint is intact."""

import errno
import fcntl
import os
import random
import select
import signal
import threading
import time

import pytest

from neumann.lab.training.checkpoints import Checkpoints
from tests.support.checkpointing import consistent, names, payload
from tests.support.programs import Program

SAVER = """
import sys, torch
from pathlib import Path
from neumann.lab.training.checkpoints import Checkpoints
torch.set_num_threads(1)
checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
for step in range(1 << 30):
    checkpoints.save(step, {"step": step, "x": torch.full((50_000,), float(step))})
    print(step, flush=True)
"""


def fork_saver(folder, first):
    """Saves until killed. A fork spares the import of torch, so there can be many.

    The payload is small enough for torch to fill it without threads, which a fork does not have.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            checkpoints = Checkpoints(folder, keep=2)
            for step in range(first, first + 1000):
                checkpoints.save(step, payload(step, size=30_000))
                os.write(writing, b"%d\n" % step)
        finally:
            os._exit(1)
    os.close(writing)
    return child, reading


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_killed_at_any_moment_the_newest_checkpoint_is_intact(tmp_path):
    chance = random.Random(0)
    checkpoints = Checkpoints(tmp_path)
    step = 0
    leftovers = 0
    for _ in range(50):
        child, reading = fork_saver(tmp_path, step + 1)
        select.select([reading], [], [], 10)
        time.sleep(chance.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        reported = int(os.read(reading, 1 << 16).split()[-1])
        os.close(reading)
        loaded = checkpoints.load_latest()
        assert consistent(loaded)
        assert loaded.damaged == ()
        # What save() returned for is there; the one after may have been renamed already.
        assert reported <= loaded.step <= reported + 1
        assert len(checkpoints._list()) <= 3
        leftovers += sum(name.endswith(".tmp") for name in names(tmp_path))
        step = loaded.step
    assert leftovers > 0  # else the kills came at no interesting moment
    checkpoints.save(step + 1, payload(step + 1))
    assert len(names(tmp_path)) == 2


@pytest.mark.slow
def test_a_separate_process_killed_while_it_saves(tmp_path):
    with Program("-c", SAVER, str(tmp_path)) as saver:
        while "checkpoint-000000000002.pt" not in names(tmp_path):
            assert saver.poll() is None
            time.sleep(0.001)
        time.sleep(0.01)
        saver.send_signal(signal.SIGKILL)
        reported = int(saver.wait().stdout.split()[-1])
    loaded = Checkpoints(tmp_path).load_latest()
    assert loaded.step in (reported, reported + 1)
    assert consistent(loaded)


def test_leftovers_are_removed_but_not_the_file_of_a_live_writer(tmp_path):
    left = tmp_path / ".aside-0123456789abcdef.tmp"
    live = tmp_path / ".aside-fedcba9876543210.tmp"
    left.write_bytes(b"half")
    with live.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Checkpoints(tmp_path).save(1, payload(1))
        assert names(tmp_path) == [live.name, "checkpoint-000000000001.pt"]
    Checkpoints(tmp_path).save(1, payload(1))
    assert names(tmp_path) == ["checkpoint-000000000001.pt"]


def test_a_file_removed_as_a_leftover_before_it_was_locked_is_created_again(tmp_path, monkeypatch):
    lock = fcntl.flock
    stolen = []

    def slow(descriptor, how):
        if not stolen:
            stolen.extend(tmp_path.glob("*.tmp"))
            stolen[0].unlink()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    Checkpoints(tmp_path).save(1, payload(1))
    assert len(stolen) == 1
    assert consistent(Checkpoints(tmp_path).load_latest())


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(descriptor, how):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / ".aside-0123456789abcdef.tmp").write_bytes(b"somebody's, for all we know")
    Checkpoints(tmp_path).save(1, payload(1))
    assert consistent(Checkpoints(tmp_path).load_latest())
    assert len(names(tmp_path)) == 2


def test_a_checkpoint_pruned_while_it_is_loaded(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, payload(1))
    read = type(path).read_bytes

    def late(self):
        if self == path and path.exists():
            path.unlink()
            checkpoints.save(2, payload(2))
        return read(self)

    monkeypatch.setattr(type(path), "read_bytes", late)
    assert checkpoints.load_latest().step == 2


@pytest.mark.slow
def test_two_savers_and_a_reader(tmp_path):
    """Threads stand for processes: flock and rename treat two descriptors the same way."""
    failures = []

    def save(first):
        try:
            for step in range(first, first + 120, 2):
                Checkpoints(tmp_path).save(step, payload(step))
        except BaseException as error:
            failures.append(error)

    savers = [threading.Thread(target=save, args=(first,)) for first in (1, 2)]
    for saver in savers:
        saver.start()
    while any(saver.is_alive() for saver in savers):
        loaded = Checkpoints(tmp_path).load_latest()
        assert loaded is None or (consistent(loaded) and not loaded.damaged)
    assert failures == []
    assert Checkpoints(tmp_path).load_latest().step == 120
    assert not list(tmp_path.glob("*.tmp"))
