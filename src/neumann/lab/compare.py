"""Several optimizers over the same seeds.

A seed gives every arm the same initial weights, data order and augmentation, so the arms are
compared pair by pair. Each training has a folder of its own; one that is finished is never
repeated, one that was interrupted goes on. Seeds and arms may be added to a comparison later, or
left out (see comparison); whatever else all its trainings share stays as it was, also what
"automatic" means: a training that was begun with other settings is refused.

One job trains in this process; more of them each keep a process, which takes one training after
the other, so data are opened and models compiled once a process. Such a process ends as soon as
its parent has. Stopped by a signal, trainings under way save themselves and ComparisonInterrupted
is raised. UsageError before anything is written for what no training could use, and for a folder
that another process uses; CrashedError where a process died, with what is finished kept.
"""

import contextlib
import os
import signal
import threading
from collections import deque
from functools import partial
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from neumann.lab.comparison import (
    Comparison,
    Finished,
    finished,
    read,
    refuse_another,
    run_folder,
    write_down,
)
from neumann.lab.config import KEEPING, CompareConfig, TrainConfig
from neumann.lab.data import Dataset
from neumann.lab.errors import UsageError
from neumann.lab.files import StorageError, reason
from neumann.lab.interruption import (
    ComparisonInterrupted,
    Interrupted,
    noticed,
    number_of,
    terminable,
)
from neumann.lab.locks import Claim
from neumann.lab.opening import open_dataset
from neumann.lab.outcome import Diverged
from neumann.lab.processes import Process
from neumann.lab.reading import CONFIG, is_finished
from neumann.lab.records import refuse_another as refuse_another_run
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


def compare(config: CompareConfig, folder: Path, watch: Watch | None = None) -> Comparison:
    """Train what is not trained yet, and compare."""
    dataset = tried(config, folder)
    with claimed(folder):
        return _compare(config, folder, dataset, watch or Watch())


def _compare(
    config: CompareConfig, folder: Path, dataset: Dataset | None, watch: Watch
) -> Comparison:
    runs = _runs(config, folder)
    refuse_another(config, folder)
    for run in runs.values():
        if (_output(run) / CONFIG).exists():
            refuse_another_run(_output(run), _settings(run))
    write_down(config, folder)
    waiting = {key: run for key, run in runs.items() if not is_finished(_output(run))}
    watch.began(len(runs) - len(waiting), len(runs))
    number: int | None = None
    try:
        if config.jobs == 1:
            _one_by_one(waiting, dataset, watch)
        else:
            del dataset  # every process opens its own
            _side_by_side(waiting, config.jobs, watch)
    except Interrupted as stopped:
        number = stopped.number
    except KeyboardInterrupt as stopped:
        number = number_of(stopped)
    if number is not None:
        ended = sum(is_finished(_output(run)) for run in runs.values())
        raise ComparisonInterrupted(number, ended, len(runs), folder)
    return read(folder)


def claimed(folder: Path) -> Claim:
    """The folder of a comparison or a sweep for this process alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Claim(folder)
    except OSError as error:
        raise UsageError(f"cannot write into {folder}: {reason(error)}") from error


def tried(config: CompareConfig, folder: Path) -> Dataset | None:
    """Refuse what cannot be trained, before anything is written; the data, if they were needed."""
    config.check()
    dataset: Dataset | None = None
    for (_, seed), run in _runs(config, folder).items():
        if seed == 0 and not _output(run).exists():
            dataset = dataset or open_dataset(run)
            Training(run, Process(), dataset)
    return dataset


def train(
    config: TrainConfig, dataset: Dataset | None = None, observe: Observer | None = None
) -> None:
    """One training, to its end or its divergence."""
    training = Training(config, Process(), dataset)
    with contextlib.suppress(Diverged):  # the summary says so
        training.run(_output(config), observe or (lambda line: None))


def _one_by_one(runs: Runs, dataset: Dataset | None, watch: Watch) -> None:
    for key, run in runs.items():
        dataset = dataset or open_dataset(run)  # the runs differ in nothing that it is made of
        train(run, dataset, partial(watch.line, *key))
        _tell(watch, key, run)


def _side_by_side(runs: Runs, jobs: int, watch: Watch) -> None:
    queue = deque(runs.items())
    workers: list[_Worker] = []
    with noticed() as signals:
        try:
            count = min(jobs, len(queue))
            for _ in range(count):
                workers.append(_Worker(_threads(count)))
                workers[-1].start(*queue.popleft())
            while signals.number is None and (busy := [w for w in workers if w.key is not None]):
                for worker in _speaking(busy):
                    key, run = worker.key, worker.run
                    if key is not None and run is not None and worker.heard(watch):
                        _tell(watch, key, run)
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


class _Worker:
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


def _speaking(workers: list[_Worker]) -> list[_Worker]:
    """Those that have something to say, once one has or some time has passed."""
    ready = wait([worker.pipe for worker in workers], LOOK)
    return [worker for worker in workers if worker.pipe in ready]


def _save_all(workers: list[_Worker]) -> None:
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


def _tell(watch: Watch, key: Key, run: TrainConfig) -> None:
    result = finished(_output(run))
    if result is not None:
        watch.ended(*key, result)


def _runs(config: CompareConfig, folder: Path) -> Runs:
    """Seed by seed, so that a comparison cut short has whole pairs."""
    return {
        (arm, seed): config.run(arm, seed, run_folder(folder, arm, seed))
        for seed in range(config.seeds)
        for arm in config.arms
    }


def _output(run: TrainConfig) -> Path:
    assert run.output is not None
    return run.output


def _settings(run: TrainConfig) -> dict[str, Any]:
    """As its records have them."""
    return {key: value for key, value in run.as_dict().items() if key not in KEEPING}
