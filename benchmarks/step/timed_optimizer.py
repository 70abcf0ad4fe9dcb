"""Optimizers that measure their own steps, and rounds in which several of them take turns."""

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import TypeVar

import torch

from benchmarks.common.timing import read_clock, synchronize, time_on_gpu
from benchmarks.step.candidates import Candidate
from benchmarks.step.shapes import Shape, make_parameters

REPLICAS = 2
LEAST_ROUNDS = 5
LONGEST_DELAY_MS = 100.0  # in which the host launches what the GPU is then timed with

Found = TypeVar("Found")


class TimedSteps:
    """Steps on a device, and the times that they took.

    Some optimizers do more in every nth step. `period` is this n: each time is the mean over as
    many steps, so both clocks see the costly steps as often as the cheap ones.
    """

    def __init__(self, device: torch.device, period: int = 1) -> None:
        self.device = device
        self.period = period
        self.wall_ms: list[float] = []
        self.gpu_ms: list[float] = []
        self.error: str | None = None  # why it is no longer timed

    def build(self) -> None:
        """Make the optimizer, and take the first steps, which create state and compile."""

    def prepare(self) -> None:
        """Make ready for a step; this does not count as its time."""

    def step(self) -> None:
        raise NotImplementedError

    def release(self) -> None:
        """Let go of the optimizer and its memory."""

    def attempt(self, call: Callable[[], Found]) -> Found | None:
        """What the call returns. If it fails, the entry keeps the reason and lets its memory go."""
        try:
            return call()
        except Exception as error:  # one optimizer must not end the measurement of the others
            self.error = describe_error(error)
        self.release()  # not in the except block, where the traceback holds tensors
        free_memory(self.device)
        return None

    def time_wall(self) -> None:
        """Time steps with their Python, until the device has finished them."""
        spent = 0.0
        for _ in range(self.period):
            self.prepare()
            start = read_clock(self.device)
            self.step()
            spent += read_clock(self.device) - start
        self.wall_ms.append(1e3 * spent / self.period)

    def time_gpu(self) -> None:
        """Time what steps keep the GPU busy with."""
        delay = min(max(1.0, 2 * self.period * median(self.wall_ms)), LONGEST_DELAY_MS)
        spent = 0.0
        for _ in range(self.period):
            self.prepare()
            spent += time_on_gpu(self.step, delay)
        self.gpu_ms.append(spent / self.period)

    def measure_peak_bytes(self) -> int | None:
        """GPU memory that a step needs beyond parameters, gradients and state."""
        if self.device.type != "cuda":
            return None
        self.prepare()
        synchronize(self.device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        synchronize(self.device)
        return torch.cuda.max_memory_allocated() - before


def time_in_rounds(timed: Sequence[TimedSteps], seconds: float) -> Iterator[tuple[int, float]]:
    """Time all that have no error until the time is up; yields the rounds and seconds so far."""
    start, rounds, passed = time.perf_counter(), 0, 0.0
    shuffle = random.Random(0).shuffle  # so that no one always profits from the same predecessor
    order = [entry for entry in timed if entry.error is None]
    while order and (rounds < LEAST_ROUNDS or passed < seconds):
        shuffle(order)
        for entry in order:
            entry.attempt(entry.time_wall)
        for entry in order:
            if entry.error is None and entry.device.type == "cuda":
                entry.attempt(entry.time_gpu)
        order = [entry for entry in order if entry.error is None]
        rounds, passed = rounds + 1, time.perf_counter() - start
        yield rounds, passed


def describe_error(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def free_memory(device: torch.device) -> None:
    """Give back what nobody refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class TimedOptimizer(TimedSteps):
    """A candidate with parameters and gradients to step on.

    Two replicas of parameters, gradients and state take turns, so that no step finds its inputs in
    the cache. No tensor holds zeros.
    """

    def __init__(self, candidate: Candidate, shapes: Sequence[Shape], device: torch.device) -> None:
        super().__init__(device)
        self.candidate = candidate
        self._shapes = shapes
        self._replicas: list[torch.optim.Optimizer] = []
        self._turn = 0

    def build(self) -> None:
        torch.manual_seed(0)
        for _ in range(REPLICAS):
            parameters = make_parameters(self._shapes, self.device)
            self._replicas.append(self.candidate.build(parameters))
        for _ in range(3 * REPLICAS):  # compiles kernels and leaves the warm-up phase
            self.step()

    def release(self) -> None:
        self._replicas.clear()

    def step(self) -> None:
        self._replicas[self._turn % REPLICAS].step()
        self._turn += 1

    def count_state_bytes(self) -> int:
        """Memory of the optimizer's state. A tensor that several parameters share counts once."""
        values = [v for entry in self._replicas[0].state.values() for v in entry.values()]
        tensors = {id(value): value for value in values if isinstance(value, torch.Tensor)}
        return sum(tensor.nbytes for tensor in tensors.values())
