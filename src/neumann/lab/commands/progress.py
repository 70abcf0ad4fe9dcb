"""Progress on standard error: a bar in a terminal, plain lines elsewhere.

The observers are called with every line of a run's records, and not more often than that.
"""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from neumann.lab.metrics import Metric
from neumann.lab.report.arm_names import shorten_names
from neumann.lab.studies.results import FinishedRun
from neumann.lab.studies.spectrum_measurement import ProductObserver
from neumann.lab.studies.workers import RunKey, Runs, StudyObserver
from neumann.lab.training.learner import Learner
from neumann.lab.training.lines import Observer

LOG_SECONDS = 30.0  # between two lines about an unfinished run
NARROW = 100  # columns, below which the text of a study leaves room for its bar
SUMMARIZING = "reading the results"  # after the last run; importing SciPy takes seconds


def _open_bar(console: Console, before: str, *after: str) -> Progress:
    """A bar between texts, which may name the fields of its task."""
    texts = [
        TextColumn(text, markup=False, table_column=Column(no_wrap=True))
        for text in (before, *after)
    ]
    left = TimeRemainingColumn(table_column=Column(no_wrap=True))
    columns = (texts[0], BarColumn(bar_width=None), *texts[1:], left)
    return Progress(*columns, console=console, transient=True)


def _log(text: str) -> None:
    # The run goes on even if nobody reads its log any more.
    with suppress(BrokenPipeError):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def show_activity(text: str) -> Iterator[None]:
    """Say in a terminal what is done meanwhile, for work that takes seconds."""
    console = Console(stderr=True)
    with console.status(text) if console.is_terminal else nullcontext():
        yield


# ---------------------------------------------------------------------- one training


@contextmanager
def show_training(learner: Learner) -> Iterator[Observer]:
    """Show the progress of one run; only the leading process shows anything."""
    console = Console(stderr=True)
    if not learner.process.is_leader:
        yield lambda line: None
    elif console.is_terminal:
        with open_training_bar(learner, console) as observe:
            yield observe
    else:
        yield _log_training(learner)


@contextmanager
def open_training_bar(learner: Learner, console: Console) -> Iterator[Observer]:
    epochs, rate = learner.config.epochs, _StepRate(learner.step)
    fields: dict[str, Any] = {"epoch": f"0/{epochs}", "rate": "", "loss": "–", "score": "–"}
    metric = learner.config.metric
    texts = ("loss {task.fields[loss]}", f"{metric.short} {{task.fields[score]}}")
    with _open_bar(console, "epoch {task.fields[epoch]}", "{task.fields[rate]}", *texts) as bar:
        task = bar.add_task("", total=learner.total_steps, completed=learner.step, **fields)

        def observe(line: dict[str, Any]) -> None:
            if line["kind"] == "spectrum":
                return
            fields["epoch"] = f"{line['epoch']:.1f}/{epochs}"
            fields["rate"] = rate.update(line["step"])
            if "train_loss" in line:
                fields["loss"] = f"{line['train_loss']:.3f}"
            if "accuracy" in line:  # the line of an evaluation
                fields["score"] = _format_score(metric, line[metric.key])
            bar.update(task, completed=line["step"], **fields)

        yield observe


def _log_training(learner: Learner) -> Observer:
    """Log a line for each epoch and evaluation, and every half minute in between."""
    rate, metric = _StepRate(learner.step), learner.config.metric
    logged = time.monotonic()

    def observe(line: dict[str, Any]) -> None:
        nonlocal logged
        now, usual = time.monotonic(), line["kind"] in ("epoch", "evaluation")
        if line["kind"] == "spectrum" or (not usual and now - logged < LOG_SECONDS):
            return
        logged = now
        epoch = line["epoch"] if line["kind"] == "epoch" else f"{line['epoch']:.2f}"
        parts = [f"epoch {epoch}/{learner.config.epochs}"]
        if "train_loss" in line:
            parts.append(f"train loss {line['train_loss']:.4f}")
        if "accuracy" in line:
            parts.append(f"{metric.short} {_format_score(metric, line[metric.key])}")
        _log("  ".join([*parts, rate.update(line["step"])]))

    return observe


class _StepRate:
    """Steps per second since the last update."""

    def __init__(self, step: int) -> None:
        self._step, self._time, self._text = step, time.perf_counter(), ""

    def update(self, step: int) -> str:
        if step == self._step:  # of an evaluation after a logged step
            return self._text
        now = time.perf_counter()
        rate = (step - self._step) / max(now - self._time, 1e-9)
        self._step, self._time, self._text = step, now, f"{rate:.1f} steps/s"
        return self._text


# ---------------------------------------------------------------------- the runs of a study


@contextmanager
def show_study(title: str = "") -> Iterator[StudyObserver]:
    """Show the progress of many runs."""
    prefix = f"{title} " if title else ""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield StudyLog(prefix)
        return
    count = "{task.fields[prefix]}{task.fields[ended]}/{task.fields[all]}"
    with _open_bar(console, count, "{task.description}") as bar:
        yield _StudyBar(bar, prefix)


class _PlannedRuns(StudyObserver):
    """Knows how long each run is, what it is scored by, and the short name of its arm."""

    def on_plan(self, runs: Runs) -> None:
        self._runs = runs
        self._names = shorten_names([arm for arm, _ in runs])

    def _name(self, arm: str, seed: int, space: str = " ") -> str:
        return f"{self._names[arm]}{space}seed {seed}"

    def _describe_place(self, key: RunKey, line: dict[str, Any]) -> str:
        """Where a run is, and its training loss if the line names it."""
        loss = line.get("train_loss")
        place = f"epoch {line['epoch']:.1f}/{self._runs[key].epochs}"
        return place if loss is None else f"{place} loss {loss:.3f}"


class _StudyBar(_PlannedRuns):
    """One bar for all runs; an unfinished run counts for the part that is done."""

    def __init__(self, bar: Progress, prefix: str) -> None:
        self._bar, self._ended, self._total = bar, 0, 0
        # Until the first line of a run: worker processes take seconds to import torch.
        self._task = bar.add_task("starting", total=None, ended=0, all="–", prefix=prefix)
        self._widest = 0  # description; if it changed its width, so would the bar
        self._unfinished: dict[RunKey, float] = {}  # the part that is done
        self._scores: dict[RunKey, str] = {}

    def on_start(self, finished: int, total: int) -> None:
        self._ended, self._total = finished, total
        self._update(total=total, all=total)
        if finished == total:
            self._describe(SUMMARIZING)

    def on_line(self, arm: str, seed: int, line: dict[str, Any]) -> None:
        key = arm, seed
        run = self._runs[key]
        self._unfinished[key] = line["epoch"] / run.epochs
        if "accuracy" in line:
            self._scores[key] = f" {_format_score(run.metric, line[run.metric.key])}"
        score, narrow = self._scores.get(key, ""), self._bar.console.width < NARROW
        place = self._describe_place(key, {**line, "train_loss": None} if narrow else line)
        shown = "" if narrow and score else f" {place}"
        self._describe(f"{self._name(arm, seed)}{shown}{score}")

    def on_finish(self, arm: str, seed: int, result: FinishedRun) -> None:
        self._ended += 1
        self._unfinished.pop((arm, seed), None)
        result_text = f"{self._name(arm, seed)} {_format_result(result)}"
        self._describe(SUMMARIZING if self._ended == self._total else result_text)

    def _describe(self, text: str) -> None:
        self._widest = max(self._widest, len(text))
        self._update(description=text.ljust(self._widest))

    def _update(self, **fields: Any) -> None:
        completed = self._ended + sum(self._unfinished.values())
        self._bar.update(self._task, completed=completed, ended=self._ended, **fields)


class StudyLog(_PlannedRuns):
    """Logs a line for each run, and for a long one a line every half minute."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._ended, self._total = prefix, 0, 0
        self._logged: dict[RunKey, float] = {}  # when a run began, or was mentioned last

    def on_start(self, finished: int, total: int) -> None:
        self._ended, self._total = finished, total
        if finished:
            _log(f"{self._prefix}{finished}/{total}  finished before")

    def on_line(self, arm: str, seed: int, line: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - self._logged.setdefault((arm, seed), now) < LOG_SECONDS:
            return
        self._logged[arm, seed] = now
        count = f"{self._prefix}{self._ended}/{self._total}"
        place = self._describe_place((arm, seed), line)
        _log(f"{count}  {self._name(arm, seed, '  ')}  {place}")

    def on_finish(self, arm: str, seed: int, result: FinishedRun) -> None:
        self._ended += 1
        count = f"{self._prefix}{self._ended}/{self._total}"
        _log(f"{count}  {self._name(arm, seed, '  ')}  {_format_result(result)}")


def _format_result(result: FinishedRun) -> str:
    score = result.score
    return "diverged" if math.isnan(score) else _format_score(result.metric, score)


def _format_score(metric: Metric, value: float) -> str:
    return f"{metric.format(value)} {metric.unit}"


# ---------------------------------------------------------------------- products of a spectrum


@contextmanager
def show_products(total: int, title: str) -> Iterator[ProductObserver]:
    """Show the progress of Lanczos runs with at most `total` products."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _log_products(title)
        return
    count = "{task.description} {task.completed:.0f}/{task.total:.0f} products"
    with _open_bar(console, count, "{task.fields[ends]}") as bar:
        task = bar.add_task(title, total=total, ends="")
        yield lambda products, low, high: bar.update(
            task, completed=products, ends=f"λ from {low:.4g} to {high:.4g}"
        )


def _log_products(title: str) -> ProductObserver:
    """Log a line after 10, 20, 40, … products."""
    threshold = 10

    def observe(products: int, low: float, high: float) -> None:
        nonlocal threshold
        if products >= threshold:
            _log(f"{title}  {products} products  λ from {low:.4g} to {high:.4g}")
            while threshold <= products:
                threshold *= 2

    return observe
