"""Trainings side by side: stopped, killed or alone, nothing is lost and nobody is left over."""

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from neumann.cli import main
from neumann.lab import workers
from neumann.lab.checkpoints import Checkpoints
from neumann.lab.compare import compare
from neumann.lab.comparison import run_folder
from neumann.lab.errors import UsageError
from neumann.lab.progress import _Ends
from neumann.lab.reading import read_metrics
from neumann.lab.studies import CompareConfig
from neumann.lab.workers import Watch
from patience import PATIENCE


class Stop(Exception):
    pass


LONG = CompareConfig(arms=("sgd", "adamw"), seeds=1, epochs=400, log_every=5)
FLAGS = ["compare", "--arms", *LONG.arms, "--seeds", "1", "--epochs", "400", "--log-every", "5"]


def begin(folder):
    """The command in a session of its own, once both of its workers train."""
    words = [sys.executable, "-m", "neumann", *FLAGS, "--jobs", "2", "--output", str(folder)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: len(list(folder.glob("*/seed-0/metrics.jsonl"))) == 2, process)
    return process


def wait_until(happened, process=None):
    end = time.monotonic() + PATIENCE
    while not happened() and (process is None or process.poll() is None):
        assert time.monotonic() < end
        time.sleep(0.01)


def workers_of(process):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [
        int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def is_running(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


class StopAtLine(Watch):
    def line(self, arm, seed, line):
        self.at = arm, line["step"]
        raise Stop


@pytest.mark.parametrize(
    ("number", "send"),
    [(signal.SIGTERM, os.kill), (signal.SIGINT, os.killpg)],  # Ctrl-C reaches the whole group
)
def test_a_signal_stops_all_and_the_same_command_goes_on(tmp_path, number, send):
    folder = tmp_path / "x"
    process = begin(folder)
    workers = workers_of(process)
    assert len(workers) == 2
    send(process.pid, number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number, errors
    assert errors == (
        f"neumann: stopped by {number.name} after 0 of 2 trainings; the same command with "
        f"--output {folder} goes on\n"
    )
    assert not any(map(is_running, workers))
    saved = {arm: saved_step(folder, arm) for arm in LONG.arms}
    assert all(saved.values())
    watch = StopAtLine()
    with pytest.raises(Stop):
        compare(LONG, folder, watch)
    assert watch.at[0] == "sgd"
    assert 0 < watch.at[1] - saved["sgd"] <= 5


def saved_step(folder, arm):
    return Checkpoints(run_folder(folder, arm, 0) / "checkpoints").latest().step


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["line", "ended"])
def test_a_signal_stops_a_single_job_too(tmp_path, capsys, monkeypatch, number, moment):
    """While it trains, and between two trainings."""
    monkeypatch.setattr(_Ends, moment, lambda *arguments: os.kill(os.getpid(), number))
    words = ["compare", "--arms", "sgd", "adamw", "--seeds", "1", "--epochs", "1"]
    assert main([*words, "--output", str(tmp_path)]) == 128 + number
    ended = 1 if moment == "ended" else 0
    assert f"by {number.name} after {ended} of 2 trainings" in capsys.readouterr().err


def test_a_worker_that_is_killed_is_an_error_and_the_others_save(tmp_path):
    folder = tmp_path / "x"
    process = begin(folder)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert errors.count("\n") == 1
    assert re.match(r"neumann: the process that trained \w+ seed 0 was killed by SIGKILL; ", errors)
    assert any(Checkpoints(file).latest() for file in folder.glob("*/seed-0/checkpoints"))


def test_killed_with_its_workers_at_work_the_same_command_goes_on_at_once(tmp_path):
    process = begin(tmp_path)
    workers = workers_of(process)
    process.kill()
    process.communicate(timeout=PATIENCE)
    with pytest.raises(Stop):
        compare(LONG, tmp_path, StopAtLine())
    assert not any(map(is_running, workers))
    for arm in LONG.arms:
        lines = [(m["step"], m["kind"]) for m in read_metrics(run_folder(tmp_path, arm, 0))]
        assert len(lines) == len(set(lines))


PARENT = """
import time
from pathlib import Path
from neumann.lab import workers
from neumann.lab.studies import CompareConfig

def train(*arguments):  # says nothing for a long time
    Path("at-work").touch()
    time.sleep(600)

workers.train = train  # in the worker, too, which imports this file

if __name__ == "__main__":
    worker = workers.Worker(1)
    worker.start(("sgd", 0), CompareConfig(device="cpu").run("sgd", 0, Path("x")))
    time.sleep(600)
"""


def test_a_worker_ends_with_its_parent_even_if_it_has_nothing_to_say(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    parent = subprocess.Popen([sys.executable, "parent.py"], cwd=tmp_path)
    wait_until((tmp_path / "at-work").exists, parent)
    (worker,) = workers_of(parent)
    parent.kill()
    parent.wait()
    end = time.monotonic() + PATIENCE
    try:
        while is_running(worker):
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        if is_running(worker):
            os.kill(worker, signal.SIGKILL)


class Pipe:
    """A worker's end, in this process."""

    def __init__(self, *runs):
        self.runs, self.words = [*runs, None], []

    def recv(self):
        return self.runs.pop(0)

    def send(self, word):
        self.words.append(pickle.loads(pickle.dumps(word)))


def test_a_worker_says_what_it_cannot_use_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "setsid", lambda: None)
    config = CompareConfig(arms=("sgd",), epochs=1)
    first, second = (config.run("sgd", seed, tmp_path / "x") for seed in range(2))
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
    assert workers._threads(3) is None
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert (workers._threads(3), workers._threads(20)) == (2, 1)
    workers._work(Pipe(), None)
    workers._work(Pipe(), 2)
    assert threads == [2]
