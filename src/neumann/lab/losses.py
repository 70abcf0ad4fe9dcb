"""The losses of the steps, summed on the device, where the host reads them only now and then."""

from typing import Any

import torch
from torch import Tensor

from neumann.lab.processes import Process, added_up, least

NEVER = 2**62  # the step of a loss that was always finite


class Losses:
    """Means of the training loss over all processes, and the first step that had none."""

    def __init__(self, device: torch.device, process: Process) -> None:
        self._process = process
        self._recent = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, steps
        self._epoch = torch.zeros_like(self._recent)
        self._first_bad = torch.full((), NEVER, dtype=torch.int64, device=device)

    def add(self, loss: Tensor, step: int) -> None:
        """Take in a step's loss without waiting for it."""
        bad = torch.where(loss.isfinite(), NEVER, step)
        torch.minimum(self._first_bad, bad, out=self._first_bad)
        self._recent[0] += loss
        self._recent[1] += 1

    def first_bad(self) -> int | None:
        """The first step whose loss was not finite in some process."""
        step = least(int(self._first_bad), self._process)
        return None if step == NEVER else step

    def recent(self) -> float | None:
        """The mean since this was last asked; None if there was no step."""
        self._epoch += self._recent
        return self._mean(self._recent)

    def epoch(self) -> float:
        """The mean since this was last asked, over what `recent` was asked for."""
        return self._mean(self._epoch) or 0.0

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"recent": self._recent.cpu(), "epoch": self._epoch.cpu()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._recent.copy_(state["recent"])
        self._epoch.copy_(state["epoch"])

    def _mean(self, sums: Tensor) -> float | None:
        total, steps = added_up(sums.clone(), self._process).tolist()
        sums.zero_()
        return total / steps if steps else None
