"""Processes that start at once, because they are copies of one that has imported torch already.

They are not copies of the process that runs the tests: it may have threads, and tests change it.
"""

import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
from contextlib import ExitStack
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import NamedTuple

import torch

from tests.support.processes import PROCESS_TIMEOUT

PRELOADED = [
    "neumann.lab.commands.main",
    "sklearn.datasets",
    "tests.support.sharding",
    "tests.support.triton_runs",  # which speeds up Triton's interpreter
    "torch._dynamo",  # torch imports it for the first optimizer of a process
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.optim",
]


# In a program: the workers of a study are copies of it, which spares their imports of torch.
FORK_WORKERS = """
import multiprocessing
from neumann.lab.studies import workers
workers.get_context = lambda method: multiprocessing.get_context("fork")
"""
FORKING_COMMAND = (
    "-c",
    f"{FORK_WORKERS}\nfrom neumann.lab.commands.main import main\nraise SystemExit(main())",
)


def copying_context() -> ForkServerContext | SpawnContext:
    if torch.cuda.is_available():  # a question after which no copy of a process can use the GPU
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


class Program:
    """Runs `python [-m] PROGRAM ...` or `python -c CODE ...`. Leaving its `with` kills it."""

    def __init__(self, *words: str, cwd: Path | str = ".", **environment: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        arguments = (words, os.path.abspath(cwd), environment, self._folder.name)
        self._process = copying_context().Process(target=_run, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join()
        self._folder.cleanup()

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> Ended:
        self._process.join(PROCESS_TIMEOUT)
        assert self._process.exitcode is not None, "it does not end"
        stdout, stderr = (Path(self._folder.name, name).read_text() for name in ("1", "2"))
        return Ended(self._process.exitcode, stdout, stderr)


def run(*words: str, cwd: Path | str = ".", **environment: str) -> Ended:
    with Program(*words, cwd=cwd, **environment) as program:
        return program.wait()


def run_ranks(size: int, *words: str) -> list[Ended]:
    """The program on every rank, as torchrun starts it."""
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
    everywhere = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(Program(*words, RANK=rank, LOCAL_RANK=rank, **everywhere))
            for rank in map(str, range(size))
        ]
        return [rank.wait() for rank in ranks]


def _run(words: tuple[str, ...], cwd: str, environment: dict[str, str], folder: str) -> None:
    os.setsid()  # a signal to the group of the tests is not for this one
    os.chdir(cwd)
    os.environ.update(environment)
    for stream in (1, 2):
        with open(f"{folder}/{stream}", "wb") as file:
            os.dup2(file.fileno(), stream)
    first, *rest = words
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        code, *rest = rest
        sys.argv = [first, *rest]
        exec(code, {"__name__": "__main__"})
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")
