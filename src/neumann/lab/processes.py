"""Several processes that train together: who this is, and what all of them know.

torchrun starts the processes and says in the environment who is who; without it there is one. What
only the leading process does (writing records), it does through `led`, so that its failure is
everyone's and nobody waits for ever.
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
    ranks: int = 1
    local_rank: int = 0  # among those of this machine

    @property
    def leads(self) -> bool:
        """Whether this process writes the records."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """The device of this name for this process: each has a GPU of its own."""
        device = torch.device(name)
        if device.type == "cuda" and device.index is None and self.ranks > 1:
            return torch.device("cuda", self.local_rank)
        return device


def expected_ranks() -> int:
    """How many processes train together; known before they have met."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


@contextmanager
def joined() -> Iterator[Process]:
    """This process, with the others that torchrun has started if it has."""
    if expected_ranks() == 1:
        yield Process()
        return
    numbers = [int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    process = Process(*numbers)
    gpus = torch.cuda.device_count()
    if 0 < gpus <= process.local_rank:
        raise UsageError(f"there are {gpus} GPUs here: torchrun --nproc-per-node {gpus} at most")
    if gpus:
        torch.cuda.set_device(process.local_rank)
    # DDP would import this when there is a group, which its default arguments would hold for ever.
    importlib.import_module("torch.distributed.nn")
    distributed.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    try:
        yield process
    finally:
        # A group ends its threads when nothing holds it any more. A thread that is left, and lets
        # go of a tensor while the interpreter goes down, takes the process down with an abort.
        gc.collect()
        distributed.destroy_process_group()


def added_up(values: Tensor, process: Process) -> Tensor:
    """The sum over all processes."""
    if process.ranks > 1:
        distributed.all_reduce(values)
    return values


def least(value: int, process: Process) -> int:
    """The smallest of all processes' numbers."""
    if process.ranks == 1:
        return value
    number = torch.tensor(value)
    distributed.all_reduce(number, distributed.ReduceOp.MIN)
    return int(number)


def gathered(value: Any, process: Process) -> list[Any]:
    """Every process's value, in the order of ranks."""
    if process.ranks == 1:
        return [value]
    values: list[Any] = [None] * process.ranks
    distributed.all_gather_object(values, value)
    return values


def led(process: Process, action: Callable[[], object]) -> None:
    """Have the leading process do something that the others wait for; its failure is everyone's."""
    failure: list[Any] = [None]
    if process.leads:
        try:
            action()
        except Exception as error:
            if process.ranks == 1:
                raise
            failure = [error]
    if process.ranks > 1:
        distributed.broadcast_object_list(failure)
    if failure[0] is not None:
        raise failure[0]


class Stopping:
    """Whether any process was asked to stop: known to all after the same step.

    A signal reaches the processes at different moments. Each step's answer is asked for in the
    background and read a step later, so nobody waits for it.
    """

    def __init__(self, process: Process) -> None:
        self._alone = process.ranks == 1
        # A group of its own: nothing of the training waits in line behind it.
        self._group = None if self._alone else distributed.new_group(backend="gloo")
        self._asked: tuple[Tensor, Any] | None = None

    def signal(self, seen: int | None) -> int | None:
        """To be called once a step with the signal this process has seen, if it has."""
        if self._alone:
            return seen
        answer = self.answer()
        number = torch.tensor(seen or 0)
        work = distributed.all_reduce(
            number, distributed.ReduceOp.MAX, group=self._group, async_op=True
        )
        self._asked = (number, work)
        return answer

    def answer(self) -> int | None:
        """What was asked for last; nothing is left on its way."""
        if self._asked is None:
            return None
        number, work = self._asked
        self._asked = None
        work.wait()
        return int(number) or None
