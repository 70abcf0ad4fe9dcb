"""Several processes that train together: which one this is, and how they exchange values.

Work that only the leader does, such as writing records, goes through `run_on_leader`, so that its
failure is raised in every process and none waits forever.
"""

import gc
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from neumann.lab.errors import UsageError


@dataclass(frozen=True)
class Process:
    """This process among those that train together."""

    rank: int = 0
    ranks: int = 1  # how many there are
    local_rank: int = 0  # among those on this machine

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """Return this process's device: with several, "cuda" is a different GPU for each."""
        device = torch.device(name)
        if device.type == "cuda" and device.index is None and self.ranks > 1:
            return torch.device("cuda", self.local_rank)
        return device


def count_processes() -> int:
    """Return how many processes train together, even before they are connected."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


@contextmanager
def join_processes() -> Iterator[Process]:
    """Yield this process, connected to the others if torchrun started several."""
    if count_processes() == 1:
        yield Process()
        return
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    process = Process(*(int(os.environ.get(name, "0")) for name in names))
    gpus = torch.cuda.device_count()
    if 0 < gpus <= process.local_rank:
        raise UsageError(f"this machine has {gpus} GPUs: use --nproc-per-node {gpus} or less")
    if gpus:
        torch.cuda.set_device(process.local_rank)
    # DDP imports this module later, while a group exists, and its default arguments would then
    # keep the group alive forever.
    importlib.import_module("torch.distributed.nn")
    distributed.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    try:
        yield process
    finally:
        # A group stops its threads when the last reference to it is gone. A thread that is still
        # there, and frees a tensor while the interpreter shuts down, aborts the process.
        gc.collect()
        distributed.destroy_process_group()


def sum_over_processes(values: Tensor, process: Process) -> Tensor:
    """Sum over all processes, in place."""
    if process.ranks > 1:
        distributed.all_reduce(values)
    return values


def min_over_processes(value: int, process: Process) -> int:
    if process.ranks == 1:
        return value
    number = torch.tensor(value)
    distributed.all_reduce(number, distributed.ReduceOp.MIN)
    return int(number)


def gather_objects(value: Any, process: Process) -> list[Any]:
    """Return every process's value, in the order of ranks."""
    if process.ranks == 1:
        return [value]
    values: list[Any] = [None] * process.ranks
    distributed.all_gather_object(values, value)
    return values


def run_on_leader(process: Process, action: Callable[[], object]) -> None:
    """Run something in the leader while the others wait. Its exception is raised in all."""
    if process.ranks == 1:
        action()
        return
    failure: list[Any] = [None]
    if process.is_leader:
        try:
            action()
        except Exception as error:
            failure = [error]
    distributed.broadcast_object_list(failure)
    if failure[0] is not None:
        raise failure[0]


class StopAgreement:
    """Makes all processes stop after the same step, though signals arrive at different times.

    A step starts a reduction in the background and reads it one step later, so that nobody waits.
    """

    def __init__(self, process: Process) -> None:
        self._alone = process.ranks == 1
        # A separate group, so that nothing of the training queues behind these reductions.
        self._group = None if self._alone else distributed.new_group(backend="gloo")
        self._pending: tuple[Tensor, Any] | None = None

    def exchange(self, received: int | None) -> int | None:
        """Share what this process has received; return what all stop for. Once per step."""
        if self._alone:
            return received
        agreed = self.finish()
        number = torch.tensor(received or 0)
        largest = distributed.ReduceOp.MAX
        work = distributed.all_reduce(number, largest, group=self._group, async_op=True)
        self._pending = (number, work)
        return agreed

    def finish(self) -> int | None:
        """Wait for the last exchange, so that none is pending, and return its result."""
        if self._pending is None:
            return None
        (number, work), self._pending = self._pending, None
        work.wait()
        return int(number) or None
