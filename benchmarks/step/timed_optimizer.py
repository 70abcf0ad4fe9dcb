"""An optimizer that measures its own steps."""

from collections.abc import Sequence
from statistics import median

import torch

from benchmarks.common.timing import read_clock, synchronize, time_on_gpu
from benchmarks.step.candidates import Candidate
from benchmarks.step.shapes import Shape, make_parameters

REPLICAS = 2


class TimedOptimizer:
    """A candidate with parameters and gradients to step on.

    Two replicas of parameters, gradients and state take turns, so that no step finds its inputs in
    the cache. No tensor holds zeros.
    """

    def __init__(self, candidate: Candidate, shapes: Sequence[Shape], device: torch.device) -> None:
        self.candidate, self._device = candidate, device
        torch.manual_seed(0)
        self._replicas = [candidate.build(make_parameters(shapes, device)) for _ in range(REPLICAS)]
        self._turn = 0
        self.wall_ms: list[float] = []
        self.gpu_ms: list[float] = []
        for _ in range(3 * REPLICAS):  # compiles kernels and leaves the warm-up phase
            self.step()

    def step(self) -> None:
        self._replicas[self._turn % REPLICAS].step()
        self._turn += 1

    def time_wall(self) -> None:
        """Time a step with its Python, until the device has finished it."""
        start = read_clock(self._device)
        self.step()
        self.wall_ms.append(1e3 * (read_clock(self._device) - start))

    def time_gpu(self) -> None:
        """Time what a step keeps the GPU busy with."""
        self.gpu_ms.append(time_on_gpu(self.step, max(1.0, 2 * median(self.wall_ms))))

    def measure_peak_bytes(self) -> int | None:
        """GPU memory that a step needs beyond parameters, gradients and state."""
        if self._device.type != "cuda":
            return None
        synchronize(self._device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        synchronize(self._device)
        return torch.cuda.max_memory_allocated() - before

    def count_state_bytes(self) -> int:
        """Memory of the optimizer's state. A tensor that several parameters share counts once."""
        values = [v for entry in self._replicas[0].state.values() for v in entry.values()]
        tensors = {id(value): value for value in values if isinstance(value, torch.Tensor)}
        return sum(tensor.nbytes for tensor in tensors.values())
