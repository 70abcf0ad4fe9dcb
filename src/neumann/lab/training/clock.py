"""The time that a run spends on training, without evaluation, measurements and checkpoints."""

import time
from dataclasses import dataclass, field

import torch

from neumann.optim.backends.cpu.compile_lock import count_seconds


@dataclass
class TrainingClock:
    """Counts the seconds of training, in laps. A lap ends once the device has finished its work.

    What the optimizer's CPU kernel spends on compiling in a lap counts as compiling.
    """

    device: torch.device
    training: float = 0.0
    compiling: float = 0.0  # the first steps of a process that compiles
    _started: float = field(default=0.0, repr=False)
    _compiled: float = field(default=0.0, repr=False)  # when the lap began

    def start(self) -> None:
        self._started, self._compiled = time.perf_counter(), count_seconds()

    def end_lap(self, *, compiling: bool = False) -> None:
        """Add the time of this lap to `training` or `compiling`, and start the next one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elapsed = time.perf_counter() - self._started
        kernel = elapsed if compiling else count_seconds() - self._compiled
        self.compiling += kernel
        self.training += elapsed - kernel
        self.start()
