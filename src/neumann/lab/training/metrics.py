"""The metrics of a run: training loss, training time, Neumann's timetable, and where lines go.

Losses are summed on the device and read only now and then, so that a step does not wait for it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from neumann.lab.training.processes import Process, min_over_processes, sum_over_processes
from neumann.lab.training.records import Records
from neumann.optim import Neumann
from neumann.optim.phases import Timetable

NEVER = 2**62  # the first step with a bad loss, if there was none
TENSORBOARD_FOLDER = "tensorboard"

Line = dict[str, Any]
Observer = Callable[[Line], None]


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
        self._recent.copy_(state["recent"])
        self._epoch.copy_(state["epoch"])

    def _take_mean(self, sums: Tensor) -> float | None:
        total, steps = sum_over_processes(sums.clone(), self._process).tolist()
        sums.zero_()
        return total / steps if steps else None


@dataclass
class TrainingClock:
    """Counts the seconds between `start` and `stop`. `stop` waits for the device."""

    device: torch.device
    training: float = 0.0
    compiling: float = 0.0  # the first steps of a process that compiles
    _started: float = field(default=0.0, repr=False)

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self, *, compiling: bool = False) -> None:
        """Add the time since the start, to `compiling` if asked to, and start again."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elapsed = time.perf_counter() - self._started
        if compiling:
            self.compiling += elapsed
        else:
            self.training += elapsed
        self.start()


def describe_timetable(optimizer: Optimizer, total_steps: int) -> Line | None:
    """Return the line with the steps (from 1) of Neumann's resets; None for other optimizers."""
    if not isinstance(optimizer, Neumann):
        return None
    group = optimizer.param_groups[0]
    warmup = group["warmup_steps"]
    timetable = Timetable(warmup, group["reset_steps"], group["reset_growth"])
    resets = []
    t = timetable.next_reset(1)
    while t is not None and warmup + t <= total_steps:
        resets.append(warmup + t)
        t = timetable.next_reset(t + 1)
    return {"kind": "timetable", "step": 0, "warmup_steps": warmup, "resets": resets}


@contextmanager
def open_writer(
    records: Records, observe: Observer, tensorboard_from: int | None
) -> Iterator[Observer]:
    """Yield a function that writes a line to the records, the observer and TensorBoard.

    TensorBoard hides earlier events after the step `tensorboard_from`; None is no TensorBoard.
    """
    board: Any = None
    if tensorboard_from is not None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(records.folder / TENSORBOARD_FOLDER)
        board = SummaryWriter(folder, purge_step=tensorboard_from + 1)

    def write(line: Line) -> None:
        records.append(**line)
        observe(line)
        for name, value in _name_numbers(line) if board else ():
            board.add_scalar(name, float(value), line["step"])

    try:
        yield write
    finally:
        if board:
            board.close()


def _name_numbers(line: Line) -> Iterator[tuple[str, float]]:
    """Yield step/train_loss, epoch/accuracy, optimizer/distance and so on."""
    for key, value in line.items():
        nested = value.items() if isinstance(value, dict) else ()
        yield from ((f"{key}/{name}", v) for name, v in nested if isinstance(v, int | float))
        if isinstance(value, int | float) and key != "step":
            yield f"{line['kind']}/{key}", value
