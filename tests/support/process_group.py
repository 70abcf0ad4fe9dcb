"""A process group that stays alive between tests, because starting it takes most of the time."""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import distributed

from tests.support.processes import PROCESS_TIMEOUT
from tests.support.programs import copying_context


class ProcessGroup:
    """A process group of `size` processes that run the functions they are given."""

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size = size
        self.backend = backend
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """The results of the function, called on every rank. It finds its rank in torch."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        answers: dict[int, Any] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready = wait(list(waiting), timeout=PROCESS_TIMEOUT)
            failure = None if ready else f"ranks {sorted(waiting.values())} gave no answer"
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    error, answers[rank] = pipe.recv()
                except EOFError:
                    error = "the process ended"
                if error:
                    failure = f"rank {rank}: {error}"
            if failure:  # the other ranks may be waiting for this one
                self.stop(failed=True)
                raise AssertionError(failure)
        return [answers[rank] for rank in range(self.size)]

    def stop(self, failed: bool = False) -> None:
        for pipe in self._pipes:
            pipe.close()  # which ends a process that waits for its next task
        for process in self._processes:
            process.join(0 if failed else 20)
            process.kill()
            process.join()
        if self._processes:
            self._directory.cleanup()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = copying_context()
        self._directory = tempfile.TemporaryDirectory()
        store = f"{self._directory.name}/store"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.size, self.backend, store, theirs, sys.path)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(
    rank: int, size: int, backend: str, store: str, pipe: Connection, path: list[str]
) -> None:
    sys.path[:] = path
    device = rank % max(torch.cuda.device_count(), 1)  # which ranks may share
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(device))
    torch.set_num_threads(1)
    where = f"file://{store}"
    distributed.init_process_group(backend, init_method=where, rank=rank, world_size=size)
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            answer = None, function(*args, **kwargs)
        except BaseException:
            answer = traceback.format_exc(), None
        pipe.send(answer)
