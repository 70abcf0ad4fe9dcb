"""Mean training losses, summed on the device and read only now and then.

So a step does not wait for the device.
"""

import torch
from torch import Tensor

from neumann.lab.training.processes import Process, min_over_processes, sum_over_processes

NEVER = 2**62  # the first step with a bad loss, if there was none


class RunningLoss:
    """Mean training losses over all processes, and the first step whose loss was not finite."""

    def __init__(self, device: torch.device, process: Process) -> None:
        self._process = process
        self._recent = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, steps
        self._epoch = torch.zeros_like(self._recent)
        self._first_bad = torch.full((), NEVER, dtype=torch.int64, device=device)

    def add(self, loss: Tensor, step: int) -> None:
        """Add a step's loss without waiting for the device."""
        bad = torch.where(loss.isfinite(), NEVER, step)
        torch.minimum(self._first_bad, bad, out=self._first_bad)
        self._recent[0] += loss
        self._recent[1] += 1

    def find_first_bad(self) -> int | None:
        """Return the first step whose loss was not finite in some process."""
        step = min_over_processes(int(self._first_bad), self._process)
        return None if step == NEVER else step

    def take_recent_mean(self) -> float | None:
        """Return the mean since the last call; None if there was no step since."""
        self._epoch += self._recent
        return self._take_mean(self._recent)

    def take_epoch_mean(self) -> float:
        """Return the mean since the last call, over the steps that `take_recent_mean` has seen."""
        return self._take_mean(self._epoch) or 0.0

    def state_dict(self) -> dict[str, Tensor]:
        return {"recent": self._recent.cpu(), "epoch": self._epoch.cpu()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, sums in (("recent", self._recent), ("epoch", self._epoch)):
            saved = state[name]
            if saved.shape != sums.shape or not saved.isfinite().all():
                raise ValueError(f"{name} should be the sum of losses and their number")
            sums.copy_(saved)

    def _take_mean(self, sums: Tensor) -> float | None:
        total, steps = sum_over_processes(sums.clone(), self._process).tolist()
        sums.zero_()
        return total / steps if steps else None
