"""Runs side by side: after a signal or a crash no result is lost and no process is left."""

import dataclasses
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from neumann.lab.commands.main import main
from neumann.lab.commands.progress import StudyLog
from neumann.lab.config import TrainConfig
from neumann.lab.errors import UsageError
from neumann.lab.storage.reading import read_metrics
from neumann.lab.studies import workers
from neumann.lab.studies.comparison import run_comparison
from neumann.lab.studies.settings import CompareConfig
from neumann.lab.studies.study_files import get_run_folder
from neumann.lab.studies.workers import DataCache, StudyObserver
from neumann.lab.training.checkpoints import Checkpoints
from neumann.lab.training.inputs import open_dataset
from tests.support.processes import PROCESS_TIMEOUT, is_running
from tests.support.programs import FORKING_COMMAND, Program


class Stop(Exception):
    pass


DATA = "synthetic:1x8x8,10,1437"  # as large as digits, without the import of scikit-learn
LONG = CompareConfig(data=DATA, arms=("sgd", "adamw"), seeds=1, epochs=400, log_every=5)
FLAGS = ["compare", "--data", DATA, "--arms", *LONG.arms, "--seeds", "1"]
FLAGS += ["--epochs", "400", "--log-every", "5"]


@contextmanager
def started(folder, command=FORKING_COMMAND):
    """The command, as soon as both workers train."""
    with Program(*command, *FLAGS, "--jobs", "2", "--output", str(folder)) as program:
        wait_until(lambda: len(list(folder.glob("*/seed-0/metrics.jsonl"))) == 2, program)
        yield program


def wait_until(happened, process=None):
    end = time.monotonic() + PROCESS_TIMEOUT
    while not happened() and (process is None or process.poll() is None):
        assert time.monotonic() < end
        time.sleep(0.01)


def workers_of(process):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    helper = b"resource_tracker"
    return [int(pid) for pid in children if helper not in Path(f"/proc/{pid}/cmdline").read_bytes()]


class StopAtLine(StudyObserver):
    def on_line(self, arm, seed, line):
        self.at = arm, line["step"]
        raise Stop


def send_to_group(pid, number):
    """The process leads its group, in which its workers would be if they had not left it."""
    assert os.getpgid(pid) == pid
    os.killpg(pid, number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "send", "words"),
    [
        (signal.SIGTERM, os.kill, FORKING_COMMAND),
        (signal.SIGINT, send_to_group, ("-m", "neumann")),  # as Ctrl-C does
    ],
)
def test_signal_saves_all_runs_and_the_command_continues(tmp_path, number, send, words):
    folder = tmp_path / "x"
    with started(folder, words) as command:
        workers = workers_of(command)
        assert len(workers) == 2
        send(command.pid, number)
        ended = command.wait()
    assert ended.returncode == 128 + number, ended.stderr
    assert ended.stderr == (
        f"neumann: stopped by {number.name} after 0 of 2 runs; run the same command with "
        f"--output {folder} to continue\n"
    )
    assert not any(map(is_running, workers))
    saved = {arm: saved_step(folder, arm) for arm in LONG.arms}
    assert all(saved.values())
    watch = StopAtLine()
    with pytest.raises(Stop):
        run_comparison(LONG, folder, watch)
    assert watch.at[0] == "sgd"
    assert 0 < watch.at[1] - saved["sgd"] <= 5


def saved_step(folder, arm):
    return Checkpoints(get_run_folder(folder, arm, 0) / "checkpoints").load_latest().step


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["on_line", "on_finish"])
def test_signal_stops_a_single_job(tmp_path, capsys, monkeypatch, number, moment):
    """During a run, and between two runs."""
    monkeypatch.setattr(StudyLog, moment, lambda *arguments: os.kill(os.getpid(), number))
    words = ["compare", "--arms", "sgd", "adamw", "--seeds", "1", "--epochs", "1"]
    assert main([*words, "--output", str(tmp_path)]) == 128 + number
    ended = 1 if moment == "on_finish" else 0
    assert f"by {number.name} after {ended} of 2 runs" in capsys.readouterr().err


@pytest.mark.slow
def test_killed_worker_is_an_error_and_the_others_save(tmp_path):
    folder = tmp_path / "x"
    with started(folder) as command:
        os.kill(workers_of(command)[0], signal.SIGKILL)
        ended = command.wait()
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    expected = r"neumann: the process that trained \w+ seed 0 was killed by SIGKILL; "
    assert re.match(expected, ended.stderr)
    assert any(Checkpoints(file).load_latest() for file in folder.glob("*/seed-0/checkpoints"))


@pytest.mark.slow
def test_command_continues_after_its_parent_was_killed(tmp_path):
    with started(tmp_path) as command:  # leaving it kills it
        workers = workers_of(command)
    with pytest.raises(Stop):
        run_comparison(LONG, tmp_path, StopAtLine())
    assert not any(map(is_running, workers))
    for arm in LONG.arms:
        lines = [(m["step"], m["kind"]) for m in read_metrics(get_run_folder(tmp_path, arm, 0))]
        assert len(lines) == len(set(lines))


PARENT = """
import time
from contextlib import contextmanager
from pathlib import Path
from neumann.lab.studies import workers
from neumann.lab.studies.settings import CompareConfig

def train(*arguments):  # sends nothing for a long time
    Path("at-work").touch()
    time.sleep(600)

workers.train_run = train  # also in the worker, which imports this file

if __name__ == "__main__":
    worker = workers.Worker(1)
    worker.start(("sgd", 0), CompareConfig(device="cpu").make_run_config("sgd", 0, Path("x")))
    time.sleep(600)
"""


@pytest.mark.slow
def test_silent_worker_exits_with_its_parent(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    parent = subprocess.Popen([sys.executable, "parent.py"], cwd=tmp_path)
    wait_until((tmp_path / "at-work").exists, parent)
    (worker,) = workers_of(parent)
    parent.kill()
    parent.wait()
    end = time.monotonic() + PROCESS_TIMEOUT
    try:
        while is_running(worker):
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        if is_running(worker):
            os.kill(worker, signal.SIGKILL)


class Pipe:
    """Stands for the worker's end of the pipe."""

    def __init__(self, *runs):
        self.runs, self.words = [*runs, None], []

    def recv(self):
        return self.runs.pop(0)

    def send(self, word):
        self.words.append(pickle.loads(pickle.dumps(word)))


def test_worker_reports_an_unusable_run_and_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "setsid", lambda: None)
    config = CompareConfig(arms=("sgd",), epochs=1)
    first, second = (config.make_run_config("sgd", seed, tmp_path / "x") for seed in range(2))
    pipe = Pipe(first, second, first)
    workers._work(pipe, None)
    ends = [word for word in pipe.words if not isinstance(word, dict)]
    assert ends[0] is ends[2] is None
    assert isinstance(ends[1], UsageError)
    assert "holds a run with another config: seed is 0 there, 1 here" in str(ends[1])


def test_jobs_share_the_threads(monkeypatch):
    threads = []
    monkeypatch.setattr(os, "setsid", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert workers._threads_per_worker(3) is None
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert (workers._threads_per_worker(3), workers._threads_per_worker(20)) == (2, 1)
    workers._work(Pipe(), None)
    workers._work(Pipe(), 2)
    assert threads == [2]


@pytest.mark.parametrize("change", [{"context": 16}, {"held_out": True}])
def test_runs_share_a_data_set_unless_they_need_another(tmp_path, change):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question " * 60)
    run = TrainConfig(data=f"text:{text}", model="gpt", context=32).resolve()
    data = DataCache()
    first = data.open(run)
    assert data.open(dataclasses.replace(run, opt="sgd", seed=1, lr=0.5)) is first
    changed = dataclasses.replace(run, **change)
    found, expected = data.open(changed), open_dataset(changed)
    assert describe(found) == describe(expected) != describe(first)


def describe(dataset):
    return dataset.shape, len(dataset.train), len(dataset.test)
