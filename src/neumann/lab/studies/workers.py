"""Worker processes that train the runs of a study side by side.

A worker trains one run after another. For each run it sends its parent

    a dict          each line of the records
    None            the run has finished or diverged
    an exception    the run cannot be trained
    an int          the signal that stopped the worker; its run has ended or is saved

A signal to the parent raises Interrupted there once every worker has saved. A worker that dies
raises CrashedError there; finished runs are kept. A worker exits as soon as its parent does.
"""

import contextlib
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from neumann.lab.config import TrainConfig
from neumann.lab.data import Dataset
from neumann.lab.errors import UsageError
from neumann.lab.storage.atomic_files import StorageError
from neumann.lab.training.inputs import get_data_settings, open_dataset
from neumann.lab.training.lines import Observer
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process, gather_objects
from neumann.lab.training.records import Diverged
from neumann.lab.training.signals import Interrupted, catch_signals, raise_on_sigterm

if TYPE_CHECKING:
    from neumann.lab.studies.results import FinishedRun  # workers start faster without SciPy

POLL_SECONDS = 0.2  # between two checks for a signal
SAVE_SECONDS = 60.0  # that a worker may take to save its run
SAVED = "after saving every run"

RunKey = tuple[str, int]  # arm and seed
Runs = dict[RunKey, TrainConfig]


class CrashedError(RuntimeError):
    """A worker died: it was killed, ran out of memory, or printed the traceback of a bug."""


STOPS = (UsageError, StorageError, CrashedError, Interrupted)  # errors that stop the whole study


class StudyObserver:
    """Follows the progress of a study. This one ignores everything."""

    def on_plan(self, runs: Runs) -> None: ...
    def on_start(self, finished: int, total: int) -> None: ...
    def on_line(self, arm: str, seed: int, line: dict[str, Any]) -> None: ...
    def on_finish(self, arm: str, seed: int, result: "FinishedRun") -> None: ...


class DataCache:
    """Keeps the data set of the last run, which the next run mostly uses too."""

    def __init__(self) -> None:
        self._settings: dict[str, Any] = {}
        self._dataset: Dataset | None = None

    def open(self, run: TrainConfig, process: Process | None = None) -> Dataset:
        settings = get_data_settings(run, process or Process())
        if self._dataset is None or settings != self._settings:
            self.close()  # before another takes its memory
            self._dataset, self._settings = open_dataset(run, process), settings
        return self._dataset

    def close(self) -> None:
        self._dataset = None


def train_run(
    config: TrainConfig,
    dataset: Dataset | None = None,
    observe: Observer | None = None,
    process: Process | None = None,
) -> int | None:
    """Train one run until it finishes or diverges; a signal that came too late to interrupt it."""
    training = Training(config, process or Process(), dataset)
    with contextlib.suppress(Diverged):  # the run's summary records it
        training.run(get_output_folder(config), observe or (lambda line: None))
    return training.late_signal


def get_output_folder(run: TrainConfig) -> Path:
    assert run.output is not None
    return run.output


class Team:
    """The processes of torchrun, which train every run together.

    The leader conducts the study, and the others follow: they get each run from it, train their
    share, and see nothing else of the study.
    """

    def __init__(self, process: Process) -> None:
        self._process, self._data = process, DataCache()

    def train(self, run: TrainConfig, observe: Observer) -> int | None:
        """As the leader, train a run with everyone; see `train_run`."""
        gather_objects(run, self._process)
        return self._train(run, observe)

    def dismiss(self) -> None:
        """As the leader, tell the others that there are no more runs."""
        gather_objects(None, self._process)

    def follow(self) -> None:
        """As one of the others, train every run until the leader dismisses the team."""
        stop: Exception | None = None
        while (run := gather_objects(None, self._process)[0]) is not None:
            try:
                self._train(run, lambda line: None)
            except STOPS as error:  # the leader has it too, and ends the study
                stop = error
        if stop is not None:
            raise stop

    def _train(self, run: TrainConfig, observe: Observer) -> int | None:
        return train_run(run, self._data.open(run, self._process), observe, self._process)


class Worker:
    """A process that trains one run after another, as seen from its parent."""

    def __init__(self, threads: int | None) -> None:
        context = get_context("spawn")  # a forked process cannot use a GPU its parent has used
        self.pipe, worker_end = context.Pipe()
        self.process = context.Process(target=_work, args=(worker_end, threads))
        self.key: RunKey | None = None  # of the run it is training
        # Ctrl-C is handled by the parent, which passes it on as SIGTERM.
        resource_tracker.ensure_running()  # starting it later would unblock SIGINT
        with _block_sigint():
            self.process.start()
        worker_end.close()

    def start(self, key: RunKey, run: TrainConfig) -> None:
        self.key = key
        with contextlib.suppress(BrokenPipeError):  # it died; `receive` will report it
            self.pipe.send(run)

    def receive(self, observer: StudyObserver) -> bool:
        """Handle the next message of the worker, and return whether its run has ended."""
        assert self.key is not None
        try:
            message = self.pipe.recv()
        except (EOFError, ConnectionError) as error:
            self.process.join()
            (arm, seed), self.key = self.key, None
            code = self.process.exitcode or 0
            end = f"died with exit code {code}"
            if code < 0:
                end = f"was killed by {signal.Signals(-code).name}"
            raise CrashedError(
                f"the process that trained {arm} seed {seed} {end}; finished runs are kept: run "
                "the same command to continue"
            ) from error
        if isinstance(message, dict):
            observer.on_line(*self.key, message)
            return False
        self.key = None
        if isinstance(message, int):
            raise Interrupted(message, SAVED)
        if message is not None:
            raise message
        return True

    def close(self) -> None:
        """End the process. One that is still training is killed; its records survive that."""
        if self.key is None:
            with contextlib.suppress(OSError):
                self.pipe.send(None)
            self.process.join(SAVE_SECONDS)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


def train_side_by_side(
    runs: Runs,
    jobs: int,
    observer: StudyObserver,
    on_end: Callable[[RunKey], None],
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Train all runs in up to `jobs` processes. Calls `on_end` with the key of each ended run.

    Once `is_over` returns True, no run starts.
    """
    queue = deque(runs.items())
    workers: list[Worker] = []
    with catch_signals() as signals:
        try:
            count = min(jobs, len(queue))
            for _ in range(0 if is_over() else count):
                workers.append(Worker(_threads_per_worker(count)))
                workers[-1].start(*queue.popleft())
            while signals.number is None and (busy := [w for w in workers if w.key]):
                ready = wait([worker.pipe for worker in busy], POLL_SECONDS)
                for worker in busy:
                    key = worker.key
                    if worker.pipe in ready and key and worker.receive(observer):
                        on_end(key)
                        if queue and not is_over():
                            worker.start(*queue.popleft())
            _save_all(workers)
        except STOPS:
            _save_all(workers)
            raise
        finally:
            for worker in workers:
                worker.close()
    if signals.number is not None:
        raise Interrupted(signals.number, SAVED)


def _save_all(workers: list[Worker]) -> None:
    """Have every busy worker save its run, and wait until it has."""
    for worker in workers:
        if worker.key is not None:
            worker.process.terminate()
    for worker in workers:
        # However the worker stopped, the error that made us stop is the one to report.
        with contextlib.suppress(*STOPS):
            while worker.key is not None and worker.pipe.poll(SAVE_SECONDS):
                worker.receive(StudyObserver())


def _threads_per_worker(workers: int) -> int | None:
    """Each worker's share of torch's threads; None leaves it to OMP_NUM_THREADS."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    return max(torch.get_num_threads() // workers, 1)


@contextmanager
def _block_sigint() -> Iterator[None]:
    """Block SIGINT here and in processes started inside; Windows has no such mask."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---------------------------------------------------------------------- inside the worker


def _work(pipe: Connection, threads: int | None) -> None:
    """Train every run that arrives through the pipe, until None arrives."""
    if sys.platform != "win32":
        os.setsid()  # a signal to the parent's process group is the parent's to handle
    _exit_with_parent()
    if threads is not None:
        torch.set_num_threads(threads)
    data = DataCache()
    # If the parent is gone, there is nobody to train for. What was saved stays.
    with contextlib.suppress(KeyboardInterrupt, EOFError, ConnectionError), raise_on_sigterm():
        while (run := pipe.recv()) is not None:
            message: Exception | int | None = None
            try:
                message = train_run(run, data.open(run), pipe.send)
            except (UsageError, StorageError) as error:
                message = error
            except Interrupted as interruption:
                message = interruption.number
            pipe.send(message)


def _exit_with_parent() -> None:
    """Kill this process as soon as its parent is gone; its records survive that."""
    parent = parent_process()
    if parent is None:
        return

    def wait_for_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_for_parent, name="exit with parent", daemon=True).start()
