"""What the lines of a run's metrics hold, as dataclasses, and which of them a config asks for.

Version 0.1.0 wrote all that is required here, except the line with the timetable.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from neumann.lab.config import TrainConfig
from neumann.lab.metrics import LOSS, choose_metric
from neumann.lab.storage.field_types import Finite, find_wrong_field

Line = dict[str, Any]


@dataclass(frozen=True)
class TimetableLine:
    step: int
    warmup_steps: int
    resets: list[int]


@dataclass(frozen=True)
class GroupReport:
    """A parameter group in an OptimizerReport."""

    lr: float
    momentum: float
    cubic_force: float
    repulsive_force: float


@dataclass(frozen=True)
class OptimizerReport:
    """What Neumann says about itself; see optim/diagnostics.py."""

    step: int
    skipped: int
    phase: Literal["warm-up", "reset", "iterate"]
    t: int
    distance: float
    steps_to_reset: int | None
    groups: list[GroupReport]


@dataclass(frozen=True)
class StepLine:
    step: int
    epoch: Finite
    lr: float
    train_loss: float
    optimizer: OptimizerReport | None = None
    gradient_norm: float | None = None  # of Neumann, to compare its forces with
    gradients: int | None = None  # so far, of an arm with an inner loop; so are the products
    products: int | None = None


@dataclass(frozen=True)
class Reported:
    """What every step line of Neumann has."""

    optimizer: OptimizerReport


@dataclass(frozen=True)
class EpochLine:
    step: int
    epoch: int
    train_loss: float
    seconds: Finite
    loss: float | None = None  # this and the other scores: of epochs that were evaluated
    accuracy: float | None = None
    accuracy_recalibrated: float | None = None
    perplexity: float | None = None  # of text; so are the bits per byte
    bits_per_byte: float | None = None
    top5: float | None = None  # of more than five classes
    gradients: int | None = None  # as in a step's line
    products: int | None = None


@dataclass(frozen=True)
class Scores:
    """What the line of an evaluation has."""

    loss: float
    accuracy: float
    accuracy_recalibrated: float | None


@dataclass(frozen=True)
class TextScores(Scores):
    perplexity: float
    bits_per_byte: float


@dataclass(frozen=True)
class EvaluationLine(Scores):
    """Inside an epoch; see --eval-steps."""

    step: int
    epoch: Finite
    seconds: Finite
    perplexity: float | None = None  # of text; so are the bits per byte
    bits_per_byte: float | None = None
    top5: float | None = None


@dataclass(frozen=True)
class MeasuredEnds:
    """The extreme eigenvalues on a batch; see training/curvature.py."""

    examples: int
    smallest: float
    smallest_error: float
    smallest_converged: bool
    largest: float
    largest_error: float
    largest_converged: bool
    products: int
    noise: float
    implied_momentum: float | None
    implied_lr: float | None
    implied_momentum_outside: float | None
    implied_lr_outside: float | None


@dataclass(frozen=True)
class FailedMeasurement:
    examples: int
    failed: str  # the reason


@dataclass(frozen=True)
class SpectrumLine:
    step: int
    epoch: Finite
    lr: float
    momentum: float | None
    probe: dict[str, Any]  # MeasuredEnds or a FailedMeasurement; so is `current`
    current: dict[str, Any]


LINES: dict[str, type[Any]] = {
    "timetable": TimetableLine,
    "step": StepLine,
    "epoch": EpochLine,
    "evaluation": EvaluationLine,
    "spectrum": SpectrumLine,
}


def find_wrong_in_line(line: Line, config: Mapping[str, Any]) -> str | None:
    """Say what is wrong in a line of a run with this config; None if nothing is."""
    if "kind" not in line:
        return "kind is missing"
    kind = line["kind"]
    if not isinstance(kind, str) or kind not in LINES:
        return f"kind should be {' or '.join(map(repr, LINES))}, got {kind!r:.40}"
    wrong = find_wrong_field(line, LINES[kind])
    if wrong is None and kind == "spectrum":
        return _find_wrong_measurement(line)
    if wrong is None and (part := _choose_part(line, config)) is not None:
        return find_wrong_field(line, part)
    return wrong


def _find_wrong_measurement(line: Line) -> str | None:
    for batch in ("probe", "current"):
        kind = FailedMeasurement if "failed" in line[batch] else MeasuredEnds
        wrong = find_wrong_field(line[batch], kind)
        if wrong is not None:
            return f"in {batch}, {wrong}"
    return None


def _choose_part(line: Line, config: Mapping[str, Any]) -> type[Any] | None:
    """Choose what the line needs besides, by the run's optimizer, data and --eval-every."""
    opt, epochs, every = (
        config.get(name, getattr(_USUAL, name)) for name in ("opt", "epochs", "eval_every")
    )
    if line["kind"] == "step" and opt.partition(":")[0] == "neumann":
        return Reported
    evaluated = line["kind"] == "evaluation"
    if line["kind"] == "epoch":
        epoch = line["epoch"]
        evaluated = epoch == epochs or bool(every and epoch % every == 0)
    if evaluated:
        return TextScores if choose_metric(config) is LOSS else Scores
    return None


_USUAL = TrainConfig()
