"""Processes that train one run after the other, side by side.

Data are opened and models compiled once a process. A process ends as soon as its parent has, and
saves its run when its parent asks it to. Interrupted where a signal came, with everything saved;
CrashedError where a process died, with what is finished kept.
"""

import contextlib
import os
import signal
import threading
from collections import deque
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from neumann.lab.comparison import Finished, finished
from neumann.lab.config import TrainConfig
from neumann.lab.data import Dataset
from neumann.lab.errors import UsageError
from neumann.lab.files import StorageError
from neumann.lab.interruption import Interrupted, noticed, terminable
from neumann.lab.opening import open_dataset
from neumann.lab.outcome import Diverged
from neumann.lab.processes import Process
from neumann.lab.training import Observer, Training

LOOK = 0.2  # seconds between two looks whether a signal has come
PATIENCE = 60.0  # seconds in which a process that was asked to stop may save its training

Key = tuple[str, int]  # arm and seed of a training
Runs = dict[Key, TrainConfig]


class CrashedError(RuntimeError):
    """A process that trained died: killed, out of memory, or by a fault whose traceback it left."""


class Watch:
    """What a comparison tells while it goes on. This one listens to nothing."""

    def began(self, there: int, total: int) -> None:
        """Of so many trainings some were there already."""

    def line(self, arm: str, seed: int, line: dict[str, Any]) -> None:
        """A line of the records of a training."""

    def ended(self, arm: str, seed: int, result: Finished) -> None:
        """A training has ended; the result has no accuracy where it diverged."""


def train(
    config: TrainConfig, dataset: Dataset | None = None, observe: Observer | None = None
) -> None:
    """One training, to its end or its divergence."""
    training = Training(config, Process(), dataset)
    with contextlib.suppress(Diverged):  # the summary says so
        training.run(output(config), observe or (lambda line: None))


def side_by_side(runs: Runs, jobs: int, watch: Watch) -> None:
    queue = deque(runs.items())
    workers: list[Worker] = []
    with noticed() as signals:
        try:
            count = min(jobs, len(queue))
            for _ in range(count):
                workers.append(Worker(_threads(count)))
                workers[-1].start(*queue.popleft())
            while signals.number is None and (busy := [w for w in workers if w.key is not None]):
                for worker in _speaking(busy):
                    key, run = worker.key, worker.run
                    if key is not None and run is not None and worker.heard(watch):
                        tell(watch, key, run)
                        if queue:
                            worker.start(*queue.popleft())
        except (UsageError, StorageError, CrashedError, Interrupted):
            _save_all(workers)
            raise
        else:
            _save_all(workers)
        finally:
            for worker in workers:
                worker.close()
    if signals.number is not None:
        raise Interrupted(signals.number, 0)


class Worker:
    """A process that trains one run after the other."""

    def __init__(self, threads: int | None) -> None:
        context = get_context("spawn")  # a forked one could not use a GPU its parent has touched
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, threads))
        self.key: Key | None = None  # of what it trains now
        self.run: TrainConfig | None = None
        # It begins with SIGINT blocked: Ctrl-C is for its parent, which passes it on as SIGTERM.
        resource_tracker.ensure_running()  # which would unblock it
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        theirs.close()

    @property
    def pipe(self) -> Connection:
        """On which it speaks."""
        return self._pipe

    def start(self, key: Key, run: TrainConfig) -> None:
        """Give it a run to train."""
        self.key, self.run = key, run
        with contextlib.suppress(BrokenPipeError):  # it died; the next word from it says so
            self._pipe.send(run)

    def heard(self, watch: Watch) -> bool:
        """Take the next thing it says; whether it is that its run has ended."""
        assert self.key is not None
        try:
            word = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join()
            arm, seed = self.key
            self.key = None
            raise CrashedError(
                f"the process that trained {arm} seed {seed} {_death(self._process.exitcode)}; "
                "what is finished is kept, and the same command goes on"
            ) from error
        if isinstance(word, dict):
            watch.line(*self.key, word)
            return False
        self.key = None
        if isinstance(word, int):
            raise Interrupted(word, 0)
        if word is not None:
            raise word
        return True

    def stop(self) -> None:
        """Ask it to save its run."""
        self._process.terminate()

    def close(self) -> None:
        """Let it go, or end it if it is still at work: its records can bear that."""
        if self.key is None:
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self._process.join(PATIENCE)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._pipe.close()


def _speaking(workers: list[Worker]) -> list[Worker]:
    """Those that have something to say, once one has or some time has passed."""
    ready = wait([worker.pipe for worker in workers], LOOK)
    return [worker for worker in workers if worker.pipe in ready]


def _save_all(workers: list[Worker]) -> None:
    """Have all that are at work save and stop."""
    for worker in workers:
        if worker.key is not None:
            worker.stop()
    for worker in workers:
        # Interrupted, or killed before it could be: either way it has stopped.
        with contextlib.suppress(Interrupted, CrashedError, UsageError, StorageError):
            while worker.key is not None and worker.pipe.poll(PATIENCE):
                worker.heard(Watch())


def _threads(workers: int) -> int | None:
    """Each worker's part of the threads that torch uses here; None leaves it to OMP_NUM_THREADS."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    return max(torch.get_num_threads() // workers, 1)


def _work(pipe: Connection, threads: int | None) -> None:
    """In a process of its own: train what comes through the pipe, say every line and the end."""
    os.setsid()  # signals to its parent's group, as a shell sends them, are its parent's to handle
    _end_with_parent()
    if threads is not None:
        torch.set_num_threads(threads)
    dataset: Dataset | None = None
    # Without a parent there is nobody to train for; what was saved stays.
    with contextlib.suppress(KeyboardInterrupt, EOFError, ConnectionError), terminable():
        while (run := pipe.recv()) is not None:
            word: Exception | int | None = None
            try:
                dataset = dataset or open_dataset(run)
                train(run, dataset, pipe.send)
            except (UsageError, StorageError) as error:
                word = error
            except Interrupted as stopped:
                word = stopped.number
            pipe.send(word)


def _end_with_parent() -> None:
    """Have this process die when its parent has, whatever it does then: its records can bear it."""
    parent = parent_process()
    if parent is None:  # it is no worker
        return

    def wait_for_it() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_for_it, name="end with parent", daemon=True).start()


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"died with exit code {code}"


def tell(watch: Watch, key: Key, run: TrainConfig) -> None:
    result = finished(output(run))
    if result is not None:
        watch.ended(*key, result)


def output(run: TrainConfig) -> Path:
    assert run.output is not None
    return run.output
