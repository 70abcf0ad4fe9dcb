"""Folders of runs: names, and a lock that only a live process can hold."""

import errno
import fcntl
import os
import signal
import threading
import time
import warnings

import pytest

from neumann.lab.config import TrainConfig
from neumann.lab.errors import UsageError
from neumann.lab.storage import folders
from neumann.lab.storage.folders import FolderLock, new_run_folder
from neumann.lab.storage.reading import read_metrics
from neumann.lab.studies import workers
from neumann.lab.studies.settings import CompareConfig
from neumann.lab.training.records import Records

CONFIG = {"opt": "neumann", "lr": 0.2}


def test_a_new_run_folder_has_a_plain_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(data="text:/a/b c.txt", model="gpt", opt="adamw:lr=1", seed=3)
    folder = new_run_folder(config.title)
    assert folder.parts == ("runs", "text__a_b_c.txt-gpt-adamw-seed3-1")
    folder.mkdir(parents=True)
    assert new_run_folder(config.title).name.endswith("-2")


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(folders, "LOCK_TIMEOUT", 0.0)


@pytest.mark.usefixtures("impatient")
def test_a_folder_is_locked_until_its_writer_closes_it(tmp_path):
    records = Records(tmp_path).begin(CONFIG)
    with pytest.raises(UsageError, match=r"is in use by another process") as caught:
        Records(tmp_path).begin(CONFIG)
    assert str(tmp_path) in str(caught.value)
    records.finish({})
    Records(tmp_path).begin(CONFIG)
    records.append(kind="step", step=1)  # locks again
    with pytest.raises(UsageError, match="in use"):
        Records(tmp_path).rewind(0)
    records.close()
    Records(tmp_path).rewind(0)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "metrics.jsonl"]


@pytest.mark.usefixtures("impatient")
def test_a_training_locks_its_folder(tmp_path):
    run = CompareConfig(arms=("sgd",), epochs=1).make_run_config("sgd", 0, tmp_path)

    class Stop(Exception):
        pass

    def observe(line):
        with pytest.raises(UsageError, match="in use by another process"):
            workers.train_run(run)
        raise Stop

    with pytest.raises(Stop) as caught:
        workers.train_run(run, observe=observe)
    assert not (tmp_path / folders.LOCK_NAME).exists()
    workers.train_run(run)  # even while the exception still holds its frames
    found = [line["step"] for line in read_metrics(tmp_path)]
    assert found == sorted(found)
    assert len(found) == len({(line["kind"], line["step"]) for line in read_metrics(tmp_path)})
    assert caught.value is not None


@pytest.mark.usefixtures("impatient")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_neither_a_killed_process_nor_its_forks_hold_the_lock(tmp_path):
    """The workers of a data loader are such forks, and notice late that their parent is gone."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            records = Records(tmp_path).begin(CONFIG)
            grandchild = os.fork()
            if grandchild == 0:
                time.sleep(60)
            os.write(writing, str(grandchild).encode())
            records.append(kind="step", step=1)
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(writing)
    grandchild = int(os.read(reading, 20))
    os.close(reading)
    try:
        with pytest.raises(UsageError, match="in use"):
            Records(tmp_path).begin(CONFIG)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert (tmp_path / folders.LOCK_NAME).exists()  # but nobody holds it
        Records(tmp_path).begin(CONFIG)
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_locking_waits_for_a_process_that_is_about_to_end(tmp_path):
    lock = FolderLock(tmp_path)
    timer = threading.Timer(0.2, lock.release)
    timer.start()
    Records(tmp_path).begin(CONFIG).close()
    timer.join()


def test_a_read_only_folder_is_not_locked(tmp_path, monkeypatch):
    Records(tmp_path).begin(CONFIG).close()

    def refuse(path, *arguments):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(os, "open", refuse)
    Records(tmp_path).begin(CONFIG)


def test_a_file_system_without_locks_is_not_locked(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with FolderLock(tmp_path), FolderLock(tmp_path):
            pass
