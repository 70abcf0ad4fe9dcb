"""The time that a run spends on training, without evaluation, measurements and checkpoints."""

import time
from dataclasses import dataclass, field

import torch


@dataclass
class TrainingClock:
    """Counts the seconds of training, in laps. A lap ends once the device has finished its work."""

    device: torch.device
    training: float = 0.0
    compiling: float = 0.0  # the first steps of a process that compiles
    _started: float = field(default=0.0, repr=False)

    def start(self) -> None:
        self._started = time.perf_counter()

    def end_lap(self, *, compiling: bool = False) -> None:
        """Add the time of this lap to `training` or `compiling`, and start the next one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elapsed = time.perf_counter() - self._started
        if compiling:
            self.compiling += elapsed
        else:
            self.training += elapsed
        self.start()
