"""How a run ended, as dataclasses, and whether the files of its folder belong together.

`read_run_files` checks the type of every field, that the metrics have the lines of every step up to
the end of the run or its last checkpoint, and that they end as the summary says. Raises UsageError
for a folder that is not a run's, and RecordsError, which names the file and what to do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

from neumann.lab.config import TrainConfig
from neumann.lab.storage import reading
from neumann.lab.storage.field_types import Finite, find_wrong_field
from neumann.lab.storage.metrics_lines import Line, find_wrong_in_line
from neumann.lab.storage.reading import CONFIG, METRICS, RESTORE, SUMMARY, RecordsError

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Summary:
    """The result of a run that came to its end."""

    accuracy: Finite  # %, at the evaluation weights after the last step
    accuracy_recalibrated: Finite | None  # %, with BatchNorm statistics computed at those weights
    loss: Finite  # nats, on the evaluated split
    train_loss: Finite  # nats, mean over the last epoch
    steps: int
    seconds: Finite  # of training alone
    compile_seconds: Finite  # of the first steps, in which everything is compiled
    steps_to_target: int | None
    epochs_to_target: Finite | None
    perplexity: float | None = None  # of text; so are the bits per byte
    bits_per_byte: Finite | None = None
    top5: Finite | None = None  # %, of more than five classes
    gradients: int | None = None  # of an arm with an inner loop; so are the products
    products: int | None = None  # with the curvature

    def as_record(self) -> dict[str, Any]:
        """Return what summary.json holds: the last five only where they exist."""
        found = asdict(self)
        return {k: v for k, v in found.items() if v is not None or k not in _SOMETIMES}


_SOMETIMES = ("perplexity", "bits_per_byte", "top5", "gradients", "products")


@dataclass(frozen=True)
class Divergence:
    """Where the loss was not finite."""

    step: int
    lr: float
    checkpoint: str | None  # the last good one


@dataclass(frozen=True)
class RunFiles:
    config: dict[str, Any]
    environment: dict[str, Any]
    lines: list[Line]
    summary: dict[str, Any] | None  # None: it has not finished

    @property
    def result(self) -> Summary | Divergence | None:
        """How the run ended; None if it has not."""
        if self.summary is None:
            return None
        if "diverged" in self.summary:
            return _make(Divergence, self.summary["diverged"])
        return _make(Summary, self.summary)


def read_run_files(folder: Path) -> RunFiles:
    """Read and check the files of a run, which may still be running."""
    config, environment = reading.read_config(folder), reading.read_environment(folder)
    _refuse(find_wrong_field(config, TrainConfig), folder / CONFIG)
    # First the summary: a run that finishes now has written all its lines before it.
    summary = reading.read_summary(folder)
    lines = reading.read_metrics(folder)
    for number, line in enumerate(lines, start=1):
        _refuse(find_wrong_in_line(line, config), folder / METRICS, number)
    if summary is not None:
        diverged = "diverged" in summary
        content = summary["diverged"] if diverged else summary
        _refuse(find_wrong_field(content, Divergence if diverged else Summary), folder / SUMMARY)
    files = RunFiles(config, environment, lines, summary)
    _check_end(files, folder)
    return files


def check_lines(
    lines: Sequence[Line], config: Mapping[str, Any], step: int, per_epoch: int | None, path: Path
) -> None:
    """Raise a RecordsError unless the metrics have all lines up to a step that was completed."""
    every = {name: config.get(name, getattr(TrainConfig(), name)) for name in _PERIODS}
    _refuse("--log-every is 0" if every["log_every"] == 0 else None, path.parent / CONFIG)
    backwards = any(
        a["step"] > b["step"] for a, b in pairwise(lines) if "step" in a and "step" in b
    )
    _refuse("its steps go backwards" if backwards else None, path)
    for kind in ("step", "epoch", "evaluation", "spectrum"):
        steps = [line["step"] for line in lines if line["kind"] == kind]
        ordered = all(a < b for a, b in pairwise(steps))
        _refuse(None if ordered else f"the lines of kind {kind} are not in order", path)
        period = per_epoch if kind == "epoch" else every[_PERIOD_OF[kind]]
        found, expected = set(steps), list(range(period, step + 1, period)) if period else []
        if kind == "evaluation":  # the end of an epoch is in the epoch's line
            expected = [s for s in expected if per_epoch is not None and s % per_epoch]
        missing = next((s for s in expected if s not in found), None)
        wrong = f"it lacks the {kind} line of step {missing}, and the run has completed {step}"
        _refuse(None if missing is None else wrong, path)


_PERIOD_OF = {"step": "log_every", "evaluation": "eval_steps", "spectrum": "spectrum_every"}
_PERIODS = tuple(_PERIOD_OF.values())


def _check_end(files: RunFiles, folder: Path) -> None:
    """Check that the metrics of a finished run reach its end, and end as its summary says."""
    path, result = folder / METRICS, files.result
    if result is None:
        return
    if isinstance(result, Divergence):
        check_lines(files.lines, files.config, max(result.step - 1, 0), None, path)
        return
    epochs = files.config.get("epochs", TrainConfig().epochs)
    whole = epochs > 0 and result.steps > 0 and result.steps % epochs == 0
    wrong = f"{result.steps} steps are not {epochs} whole epochs, which {CONFIG} names"
    _refuse(None if whole else wrong, folder / SUMMARY)
    check_lines(files.lines, files.config, result.steps, result.steps // epochs, path)
    last = max(line.get("step", 0) for line in files.lines)
    wrong = f"it goes on to step {last}, but the run ended after {result.steps}"
    _refuse(wrong if last > result.steps else None, path)
    end = next(m for m in reversed(files.lines) if m["kind"] == "epoch")
    scores = ("accuracy", "accuracy_recalibrated", *_SOMETIMES, "loss")
    for name in (*scores, "train_loss", "seconds"):
        there, here = end.get(name), getattr(result, name)
        _refuse(None if there == here else f"{name} is {here}, but {there} in {path.name}",
                folder / SUMMARY)  # fmt: skip


def _refuse(wrong: str | None, path: Path, line: int | None = None) -> None:
    if wrong is not None:
        place = "" if line is None else f" in line {line}"
        raise RecordsError(f"{path} is damaged{place}: {wrong}; {RESTORE}")


def _make(kind: type[_Kind], content: Mapping[str, Any]) -> _Kind:
    """Build a dataclass from the keys that it knows."""
    names = [each.name for each in fields(cast(Any, kind))]
    return kind(**{name: content[name] for name in names if name in content})
