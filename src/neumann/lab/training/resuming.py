"""Whether a checkpoint belongs to a run, and holds all that the run needs to continue.

A checkpoint carries the config of its run, as config.json has it, and the last epoch's line of the
metrics. A checkpoint of another run is a UsageError that names the differing settings; one that
does not hold what it should is a CheckpointError. Both name the file and what to do. Checkpoints of
version 0.1.0 have no config; their optimizer's options and last epoch must still be the run's.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from neumann.lab.config_files import fill_in_run_defaults, refuse_difference
from neumann.lab.errors import UsageError, shorten
from neumann.lab.storage import strict_json
from neumann.lab.storage.atomic_files import StorageError
from neumann.lab.storage.field_types import Finite, find_wrong_field
from neumann.lab.storage.metrics_lines import EpochLine, Line
from neumann.lab.storage.reading import METRICS
from neumann.lab.storage.run_files import Summary
from neumann.lab.training.checkpoints import CheckpointError, LoadedCheckpoint
from neumann.lab.training.processes import count_processes

REMOVE = "remove it to continue from an earlier one or from the start"
ANOTHER_RUN = "a checkpoint of another run"
SIMPLE = (bool, int, float, str, type(None))
# Options of an optimizer that say how it computes, or that a schedule changes.
CHANGING = {"lr", "foreach", "fused", "capturable", "differentiable", "maximize"}
_LOADING_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
)


@dataclass(frozen=True)
class ProcessState:
    """What a checkpoint holds for each process."""

    rng: dict[str, Any]
    losses: dict[str, Any]
    statistics: list[Any]
    average_statistics: list[Any] | None = None  # with --ema


@dataclass(frozen=True)
class Payload:
    """What a checkpoint holds."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    processes: list[ProcessState]
    seconds: Finite
    compile_seconds: Finite
    reached: int | None
    last: dict[str, Any]  # the last epoch's line, with the scores of the last evaluation
    average: dict[str, Any] | None = None  # with --ema: the average weights by name
    config: dict[str, Any] | None = None  # of the run; version 0.1.0 did not save it
    counts: dict[str, int] | None = None  # of an inner loop; version 0.1.0 had none


def check_checkpoint(found: LoadedCheckpoint, config: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that lacks something, or comes from a run with another config."""
    wrong = find_wrong_field(found.payload, Payload)
    if wrong is not None:
        raise CheckpointError(f"{found.path} is not the checkpoint of a run: {wrong}; {REMOVE}")
    saved = found.payload.get("config")
    if saved is not None:
        with explain_misfit(found):
            written = strict_json.encode(saved)
        current = strict_json.encode(dict(config))
        before = fill_in_run_defaults(written, current, count_processes())
        refuse_difference(found.path, ANOTHER_RUN, before, current, REMOVE)


def check_optimizer(found: LoadedCheckpoint, optimizer: Optimizer) -> None:
    """Refuse a checkpoint whose optimizer has other options, or state that is not its own.

    Optimizers other than Neumann would adopt any state, and fail in their first step.
    """
    saved = found.payload["optimizer"]
    known = inspect.signature(type(optimizer)).parameters.keys()
    indices = count()
    for old, new in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        # torch looks up a parameter's state by its number, and leaves out what it does not find.
        if old["params"] != [next(indices) for _ in new["params"]]:
            raise ValueError(f"the group's parameters are {old['params']!s:.60}")
        shared = known & old.keys() & new.keys()
        constant = [key for key in shared - CHANGING if isinstance(new[key], SIMPLE)]
        before, now = ({key: _show(of[key]) for key in constant} for of in (old, new))
        refuse_difference(found.path, ANOTHER_RUN, before, now, REMOVE)
        for key in shared & CHANGING:
            if not isinstance(old[key], SIMPLE):
                raise TypeError(f"{key} is a {type(old[key]).__name__}")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, p in enumerate(parameters):
        lost = optimizer.state.get(p, {}).keys() - saved["state"].get(index, {}).keys()
        if lost:  # Neumann has its state from the start, and would begin again with what is lost
            raise LookupError(f"the state of parameter {index} has no {', '.join(sorted(lost))}")
    for index, state in saved["state"].items():
        own = optimizer.state.get(parameters[index], {})
        for key, value in state.items():
            is_tensor, expected = isinstance(value, Tensor), own.get(key)
            if key in own and is_tensor != isinstance(expected, Tensor):
                raise TypeError(f"{key} of parameter {index} is a {type(value).__name__}")
            shape = parameters[index].shape
            per_row = torch.Size([*shape[:1], 1])  # of NorMuon
            shapes = [shape, torch.Size(), torch.Size([1]), per_row]
            if isinstance(expected, Tensor):
                shapes = [expected.shape]
            if is_tensor and value.shape not in shapes:
                raise ValueError(f"{key} of parameter {index} has the shape {tuple(value.shape)}")
            if not is_tensor and not isinstance(value, SIMPLE) and not _is_per_side(value, shape):
                raise TypeError(f"{key} of parameter {index} is a {type(value).__name__}")


def check_last_epoch(
    found: LoadedCheckpoint, lines: Sequence[Line], per_epoch: int, total: int
) -> None:
    """Refuse a checkpoint beyond the end of the run, or whose last epoch is not in the metrics."""
    last, step = found.payload["last"], found.step
    wrong = find_wrong_field(last, EpochLine) if last else None
    if step > total:
        wrong = f"step {step} lies after the run's last, {total}"
    ends = [m for m in lines if m["kind"] == "epoch" and m["step"] == step // per_epoch * per_epoch]
    line = ends[-1] if ends else {}
    if bool(line) != bool(last):
        wrong = f"it {'has' if last else 'lacks'} the scores of an epoch, unlike {METRICS}"
    for key, value in line.items():
        if wrong is None and last.get(key) != value:
            wrong = f"its {key} is {last.get(key)!r:.40}, but {value!r:.40} in {METRICS}"
    if wrong is None and step == total:
        rest = {"steps": step, "compile_seconds": 0, "steps_to_target": 0, "epochs_to_target": 0}
        wrong = find_wrong_field({**last, **rest}, Summary)
    if wrong is not None:
        raise CheckpointError(f"{found.path} does not belong to this run: {wrong}; {REMOVE}")


@contextmanager
def explain_misfit(found: LoadedCheckpoint) -> Iterator[None]:
    """Turn whatever torch raises for state that does not fit into a CheckpointError."""
    try:
        yield
    except (UsageError, StorageError, torch.OutOfMemoryError):
        raise
    except _LOADING_ERRORS as error:
        detail = f"{type(error).__name__}: {shorten(error)}"
        raise CheckpointError(f"{found.path} does not fit this run ({detail}); {REMOVE}") from error


def _is_per_side(value: Any, shape: torch.Size) -> bool:
    """Whether it is a square matrix for each side of a parameter, or [] for a long one: SOAP's."""
    if type(value) is not list or len(value) != len(shape):
        return False
    return all(
        each.shape == (side, side) if isinstance(each, Tensor) else each == []
        for each, side in zip(value, shape, strict=True)
    )


def _show(value: Any) -> Any:
    return value if isinstance(value, SIMPLE) else type(value).__name__
