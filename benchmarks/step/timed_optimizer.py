"""Optimizers that measure their own steps, and rounds in which several of them take turns."""

import random
import time
from collections.abc import Iterator, Sequence
from statistics import median

import torch

from benchmarks.common.timing import read_clock, synchronize, time_on_gpu
from benchmarks.step.candidates import Candidate
from benchmarks.step.shapes import Shape, make_parameters

REPLICAS = 2
LEAST_ROUNDS = 5
LONGEST_DELAY_MS = 100.0  # in which the host launches what the GPU is then timed with


class TimedSteps:
    """Steps on a device, and the times that they took."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.wall_ms: list[float] = []
        self.gpu_ms: list[float] = []

    def prepare(self) -> None:
        """Make ready for a step; this does not count as its time."""

    def step(self) -> None:
        raise NotImplementedError

    def time_wall(self) -> None:
        """Time a step with its Python, until the device has finished it."""
        self.prepare()
        start = read_clock(self.device)
        self.step()
        self.wall_ms.append(1e3 * (read_clock(self.device) - start))

    def time_gpu(self) -> None:
        """Time what a step keeps the GPU busy with."""
        self.prepare()
        delay = min(max(1.0, 2 * median(self.wall_ms)), LONGEST_DELAY_MS)
        self.gpu_ms.append(time_on_gpu(self.step, delay))

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
    """Time a step of each until the time is up; yields the rounds and seconds so far."""
    start, rounds, passed = time.perf_counter(), 0, 0.0
    shuffle = random.Random(0).shuffle  # so that no one always profits from the same predecessor
    order = list(timed)
    while rounds < LEAST_ROUNDS or passed < seconds:
        shuffle(order)
        for entry in order:
            entry.time_wall()
        for entry in order:
            if entry.device.type == "cuda":
                entry.time_gpu()
        rounds, passed = rounds + 1, time.perf_counter() - start
        yield rounds, passed


class TimedOptimizer(TimedSteps):
    """A candidate with parameters and gradients to step on.

    Two replicas of parameters, gradients and state take turns, so that no step finds its inputs in
    the cache. No tensor holds zeros.
    """

    def __init__(self, candidate: Candidate, shapes: Sequence[Shape], device: torch.device) -> None:
        super().__init__(device)
        self.candidate = candidate
        torch.manual_seed(0)
        self._replicas = [candidate.build(make_parameters(shapes, device)) for _ in range(REPLICAS)]
        self._turn = 0
        for _ in range(3 * REPLICAS):  # compiles kernels and leaves the warm-up phase
            self.step()

    def step(self) -> None:
        self._replicas[self._turn % REPLICAS].step()
        self._turn += 1

    def count_state_bytes(self) -> int:
        """Memory of the optimizer's state. A tensor that several parameters share counts once."""
        values = [v for entry in self._replicas[0].state.values() for v in entry.values()]
        tensors = {id(value): value for value in values if isinstance(value, torch.Tensor)}
        return sum(tensor.nbytes for tensor in tensors.values())
