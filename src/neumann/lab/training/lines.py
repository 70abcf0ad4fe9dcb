"""The lines of a run's metrics: where they go, and what they say about Neumann."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from neumann.lab.training.records import TENSORBOARD, Records
from neumann.optim import Neumann
from neumann.optim.phases import Timetable

Line = dict[str, Any]
Observer = Callable[[Line], None]


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

        folder = str(records.folder / TENSORBOARD)
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


def measure_gradient(optimizer: Optimizer) -> float:
    """Return the norm of the last step's gradient over all parameters; all processes call this."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    norm: Any = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def _name_numbers(line: Line) -> Iterator[tuple[str, float]]:
    """Yield step/train_loss, epoch/accuracy, optimizer/distance and so on."""
    for key, value in line.items():
        nested = value.items() if isinstance(value, dict) else ()
        yield from ((f"{key}/{name}", v) for name, v in nested if isinstance(v, int | float))
        if isinstance(value, int | float) and key != "step":
            yield f"{line['kind']}/{key}", value
