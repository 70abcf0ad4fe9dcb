"""What a person sees while a run goes on: bars on a terminal, plain lines elsewhere, one process.

An observer is called with every line of the records; nothing here is asked for more often.
"""

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from neumann.lab.processes import Process
from neumann.lab.training import Observer, Training


@contextmanager
def shown(training: Training, process: Process) -> Iterator[Observer]:
    """An observer that shows the run's progress."""
    console = Console(stderr=True)
    if not process.leads:
        yield lambda line: None
    elif console.is_terminal:
        with _bar(training, console) as observe:
            yield observe
    else:
        yield _Lines(training)


@contextmanager
def counted(total: int) -> Iterator[Callable[[str, int], None]]:
    """For a comparison: how many of its trainings have ended."""
    console = Console(stderr=True)
    ended = itertools.count(1)
    if not console.is_terminal:
        yield lambda arm, seed: print(
            f"{next(ended)}/{total}  {arm}  seed {seed}", file=sys.stderr, flush=True
        )
        return
    columns = (
        TextColumn("{task.completed}/{task.total} trainings"),
        BarColumn(bar_width=None),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda arm, seed: progress.update(task, advance=1, description=f"{arm} seed {seed}")


@contextmanager
def _bar(training: Training, console: Console) -> Iterator[Observer]:
    columns = (
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[rate]}"),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("accuracy {task.fields[accuracy]}"),
        TimeRemainingColumn(),
    )
    epochs = training.config.epochs
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(
            "train",
            total=training.total_steps,
            completed=training.step,
            epoch=f"0/{epochs}",
            rate="",
            loss="–",
            accuracy="–",
        )
        meter = _Meter(training.step)

        def observe(line: dict[str, Any]) -> None:
            fields: dict[str, Any] = {
                "epoch": f"{line['epoch']:.1f}/{epochs}",
                "rate": meter.rate(line["step"]),
                "loss": f"{line['train_loss']:.3f}",
            }
            if "accuracy" in line:
                fields["accuracy"] = f"{line['accuracy']:.2f} %"
            progress.update(task, completed=line["step"], **fields)

        yield observe


class _Lines:
    """One line an epoch, for logs."""

    def __init__(self, training: Training) -> None:
        self._epochs = training.config.epochs
        self._meter = _Meter(training.step)

    def __call__(self, line: dict[str, Any]) -> None:
        if line["kind"] != "epoch":
            return
        text = f"epoch {line['epoch']}/{self._epochs}  train loss {line['train_loss']:.4f}"
        if "accuracy" in line:
            text += f"  accuracy {line['accuracy']:.2f} %"
        print(f"{text}  {self._meter.rate(line['step'])}", file=sys.stderr, flush=True)


class _Meter:
    """Steps a second since it was last asked."""

    def __init__(self, step: int) -> None:
        self._step, self._time = step, time.perf_counter()

    def rate(self, step: int) -> str:
        now = time.perf_counter()
        rate = (step - self._step) / max(now - self._time, 1e-9)
        self._step, self._time = step, now
        return f"{rate:.1f} steps/s"
