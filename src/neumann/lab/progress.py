"""What a person sees while a run goes on: bars on a terminal, plain lines elsewhere, one process.

An observer is called with every line of the records; nothing here is asked for more often.
"""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from neumann.lab.comparison import Finished
from neumann.lab.processes import Process
from neumann.lab.spectrum_command import Observe
from neumann.lab.training import Observer, Training
from neumann.lab.workers import Watch


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
def watched(epochs: int, title: str = "") -> Iterator[Watch]:
    """For a comparison of trainings of so many epochs: how far all of them are."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Ends(title)
        return
    columns = (
        TextColumn("{task.fields[title]}{task.fields[ended]}/{task.fields[all]}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Overall(progress, epochs, title)


@contextmanager
def counted(total: int, title: str) -> Iterator[Observe]:
    """For Lanczos runs of at most so many products: how many there were, and the ends so far."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Doublings(title)
        return
    columns = (
        TextColumn("{task.description} {task.completed:.0f}/{task.total:.0f} products"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[ends]}", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=total, ends="")

        def observe(products: int, low: float, high: float) -> None:
            progress.update(task, completed=products, ends=f"λ from {low:.4g} to {high:.4g}")

        yield observe


class _Doublings:
    """A line after 10, 20, 40, … products, for logs."""

    def __init__(self, title: str) -> None:
        self._title, self._next = title, 10

    def __call__(self, products: int, low: float, high: float) -> None:
        if products >= self._next:
            text = f"{self._title}  {products} products  λ from {low:.4g} to {high:.4g}"
            _say(text)
            while self._next <= products:
                self._next *= 2


class _Overall(Watch):
    """One bar for all trainings; those under way count for the part that is done."""

    def __init__(self, progress: Progress, epochs: int, title: str) -> None:
        self._progress, self._epochs = progress, epochs
        self._task = progress.add_task(
            "", total=None, ended=0, all="–", title=f"{title} " if title else ""
        )
        self._ended = 0
        self._parts: dict[tuple[str, int], float] = {}
        self._accuracies: dict[tuple[str, int], float] = {}

    def began(self, there: int, total: int) -> None:
        self._ended = there
        self._progress.update(self._task, total=total, completed=there, ended=there, all=total)

    def line(self, arm: str, seed: int, line: dict[str, Any]) -> None:
        key = arm, seed
        self._parts[key] = line["epoch"] / self._epochs
        text = f"{arm} seed {seed} epoch {math.ceil(line['epoch'])}/{self._epochs}"
        if "accuracy" in line:
            self._accuracies[key] = line["accuracy"]
        if key in self._accuracies:
            text += f" {self._accuracies[key]:.2f} %"
        self._show(description=text)

    def ended(self, arm: str, seed: int, result: Finished) -> None:
        self._ended += 1
        self._parts.pop((arm, seed), None)
        self._show(description=f"{arm} seed {seed} {_accuracy(result)}", ended=self._ended)

    def _show(self, **fields: Any) -> None:
        completed = self._ended + sum(self._parts.values())
        self._progress.update(self._task, completed=completed, **fields)


class _Ends(Watch):
    """One line a training, for logs."""

    def __init__(self, title: str) -> None:
        self._title = f"{title} " if title else ""
        self._ended = self._total = 0

    def began(self, there: int, total: int) -> None:
        self._ended, self._total = there, total
        if there:
            self._print(f"{self._title}{there}/{total}  finished before")

    def ended(self, arm: str, seed: int, result: Finished) -> None:
        self._ended += 1
        self._print(
            f"{self._title}{self._ended}/{self._total}  {arm}  seed {seed}  {_accuracy(result)}"
        )

    def _print(self, text: str) -> None:
        _say(text)


def _accuracy(result: Finished) -> str:
    return "diverged" if math.isnan(result.accuracy) else f"{result.accuracy:.2f} %"


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
            if line["kind"] == "spectrum":
                return
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
        _say(f"{text}  {self._meter.rate(line['step'])}")


class _Meter:
    """Steps a second since it was last asked."""

    def __init__(self, step: int) -> None:
        self._step, self._time = step, time.perf_counter()

    def rate(self, step: int) -> str:
        now = time.perf_counter()
        rate = (step - self._step) / max(now - self._time, 1e-9)
        self._step, self._time = step, now
        return f"{rate:.1f} steps/s"


def _say(text: str) -> None:
    """A line for a log. If nobody reads it any more, the training goes on all the same."""
    with suppress(BrokenPipeError):
        print(text, file=sys.stderr, flush=True)
