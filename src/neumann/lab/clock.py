"""The training clock: what is not training does not count, and compilation is told apart."""

import time
from dataclasses import dataclass, field

import torch


@dataclass
class Clock:
    """Seconds that have passed between `start` and `stop`; the device is waited for at each end."""

    device: torch.device
    training: float = 0.0
    compiling: float = 0.0  # the first steps of a process that compiles
    _begun: float = field(default=0.0, repr=False)

    def start(self) -> None:
        """Begin to count."""
        self._begun = time.perf_counter()

    def stop(self, *, compiled: bool = False) -> None:
        """Count what has passed since the start, and start anew."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        passed = time.perf_counter() - self._begun
        if compiled:
            self.compiling += passed
        else:
            self.training += passed
        self.start()
