"""Measure the curvature of a checkpoint's loss or of a user's model, and record it.

A checkpoint gives the model and data of its run, with the training weights (w) or the evaluation
weights (w − μm for Neumann). An entry is a user's function that returns a model, a loss and data.
The record is a JSON object, from which the plot is drawn. Whatever cannot be measured, and any
exception in the user's code, is a UsageError.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neumann.lab.config import TrainConfig
from neumann.lab.config_files import list_code, parse_settings
from neumann.lab.errors import UsageError, shorten, unknown
from neumann.lab.models import classification_loss
from neumann.lab.storage.atomic_files import StorageError
from neumann.lab.storage.field_types import find_wrong_field
from neumann.lab.storage.reading import CONFIG, RESTORE, RecordsError, read_config
from neumann.lab.studies.settings import SpectrumConfig
from neumann.lab.training.checkpoints import Checkpoints, LoadedCheckpoint
from neumann.lab.training.curvature import MAX_EXAMPLES, about_as_dict, load_probe_batch
from neumann.lab.training.environment import describe_environment
from neumann.lab.training.learner import Learner
from neumann.lab.training.network import Network
from neumann.lab.training.processes import Process
from neumann.lab.training.records import CHECKPOINTS
from neumann.lab.training.resuming import check_checkpoint, check_optimizer, explain_misfit
from neumann.lab.user_code import (
    call_user_function,
    describe_user_error,
    raised_in_user_code,
    refuse_code,
)
from neumann.spectrum import (
    CurvatureOperator,
    Density,
    Differences,
    Extremes,
    GaussNewton,
    Hessian,
    coefficients,
    density,
    extremes,
)
from neumann.spectrum.operators.batches import count_examples
from neumann.spectrum.operators.model_state import batchnorm_layers, without_tf32

# Called after each product with the number of products and the smallest and largest Ritz value.
ProductObserver = Callable[[int, float, float], object]
# Given the largest number of products and a title, opens an observer for one Lanczos run.
ShowProducts = Callable[[int, str], AbstractContextManager[ProductObserver]]

FORMAT = 1
DEFAULT_PROBES, DEFAULT_STEPS = 8, 80  # of a density
DEFAULT_CHUNK = 512  # examples at a time, if they do not influence each other
OPERATORS: dict[str, type[CurvatureOperator]] = {
    "hessian": Hessian,
    "gauss-newton": GaussNewton,
    "differences": Differences,
}


@dataclass(frozen=True)
class Problem:
    """What is measured: a model, its loss, and data."""

    model: nn.Module
    loss: Any  # as the operators of neumann.spectrum accept it
    data: dict[str, Any]  # either "batch" or "loader"
    source: dict[str, Any]  # where it came from, for the record


def measure_spectrum(config: SpectrumConfig, show_products: ShowProducts) -> dict[str, Any]:
    """Measure what the settings ask for, and return the record."""
    config.check()
    opened: AbstractContextManager[Problem]
    if config.checkpoint is not None:
        opened = _open_checkpoint(config, config.checkpoint)
    else:
        opened = nullcontext(_call_entry(str(config.entry), config))
    with opened as problem:
        try:
            ends, spread = _run_lanczos(config, problem, show_products)
        except UsageError:
            raise
        except torch.OutOfMemoryError as error:
            raise UsageError(
                "out of device memory; lower --examples, --chunk or --max-products: "
                f"{shorten(error, 120)}"
            ) from error
        except Exception as error:
            if config.entry is not None and raised_in_user_code(error):
                raise UsageError(f"--entry {config.entry}: {describe_user_error(error)}") from error
            if isinstance(error, ValueError | TypeError | RuntimeError | ArithmeticError):
                raise UsageError(shorten(error, 400)) from error
            raise  # a bug of ours keeps its traceback
    about = {"examples": ends.about.examples, "names": list(ends.about.names)}
    return {
        "format": FORMAT,
        "source": problem.source,
        "about": about_as_dict(ends.about) | about,
        "extremes": {key: value for key, value in ends.as_dict().items() if key != "about"},
        "coefficients": {
            "values": _coefficients_as_dict(ends.smallest.value, ends.largest.value),
            "outside": _coefficients_as_dict(*ends.outside),
        },
        "density": None if spread is None else _density_record(spread),
        "environment": describe_environment(),
    }


def _run_lanczos(
    config: SpectrumConfig, problem: Problem, show_products: ShowProducts
) -> tuple[Extremes, Density | None]:
    operator = _build_operator(config, problem)
    probes, steps = config.probes or DEFAULT_PROBES, config.steps or DEFAULT_STEPS
    with without_tf32(operator.device), operator.session():
        with show_products(min(config.max_products, operator.size), "ends") as observe:
            ends = extremes(
                operator,
                tolerance=config.tolerance,
                max_products=config.max_products,
                seed=config.seed,
                observe=observe,
            )
        if not config.density:
            return ends, None
        seed = config.seed + 1  # the ends used the seed itself
        with show_products(probes * min(steps, operator.size), "density") as observe:
            return ends, density(operator, probes=probes, steps=steps, seed=seed, observe=observe)


def _build_operator(config: SpectrumConfig, problem: Problem) -> CurvatureOperator:
    names = [name for name, p in problem.model.named_parameters() if p.requires_grad]
    for pattern in config.parameters:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise unknown("--parameters", pattern, names)
    chunk = config.chunk
    if chunk is None and config.checkpoint is not None:
        mixed = config.batchnorm == "batch" and batchnorm_layers(problem.model)
        if not mixed and (config.examples or 0) > DEFAULT_CHUNK:
            chunk = DEFAULT_CHUNK
    options: dict[str, Any] = {
        **problem.data,
        "batchnorm": config.batchnorm,
        "chunk": chunk,
        "weight_decay": config.weight_decay,
        "parameters": config.parameters or None,
    }
    return OPERATORS[config.operator](problem.model, problem.loss, **options)


def _coefficients_as_dict(smallest: float, largest: float) -> dict[str, float] | None:
    """The paper's μ and η, and the spectrum of B̂ that they give; None if undefined."""
    try:
        return dataclasses.asdict(coefficients(smallest, largest))
    except ValueError:
        return None


def _density_record(spread: Density) -> dict[str, Any]:
    return {
        **{key: getattr(spread, key).tolist() for key in ("points", "density", "lower", "upper")},
        "width": spread.width,
        **{key: [part.tolist() for part in getattr(spread, key)] for key in ("nodes", "weights")},
        **{key: dataclasses.asdict(getattr(spread, key)) for key in ("trace", "frobenius")},
        **{key: getattr(spread, key) for key in ("confidence", "probes", "products")},
    }


# ---------------------------------------------------------------------- a checkpoint


@contextmanager
def _open_checkpoint(config: SpectrumConfig, folder: Path) -> Iterator[Problem]:
    saved = read_config(folder)
    wrong = find_wrong_field(saved, TrainConfig)
    if wrong is not None:
        raise RecordsError(f"{folder / CONFIG} is damaged: {wrong}; {RESTORE}")
    with _name_in_errors(folder / CONFIG):
        settings = parse_settings(saved, TrainConfig)
        code = list_code(settings)
    refuse_code(folder / CONFIG, code, config.allow_code)
    run = dataclasses.replace(  # one process on the chosen device, with nothing compiled
        settings,
        device=config.device or "auto",
        data_dir=config.data_dir or settings.data_dir,
        amp="off",
        channels_last="off",
        compile="off",
        cuda_graph="off",
        fsdp=False,
        sync_bn=False,
        spectrum_every=0,
    )
    with _name_in_errors(folder / CONFIG):
        run = run.resolve()
    checkpoint = _load_checkpoint(folder, config.step)
    check_checkpoint(checkpoint, saved)
    try:
        learner = Learner(run, Process())
    except (MemoryError, OverflowError, RuntimeError) as error:  # numbers that are much too large
        if isinstance(error, StorageError):
            raise
        raise UsageError(f"{folder / CONFIG} cannot be built here: {shorten(error)}") from error
    # The optimizer's state of a sharded run is keyed by name.
    network = Network(learner.model, learner.model, bool(saved.get("fsdp")))
    with explain_misfit(checkpoint):
        if not network.sharded:
            check_optimizer(checkpoint, learner.optimizer)
        network.load_state(learner.optimizer, checkpoint.payload)
        if learner.average is not None:
            statistics = checkpoint.payload["processes"][0]["average_statistics"]
            learner.average.load(checkpoint.payload["average"], statistics)
    available = len(learner.dataset.train)
    examples = config.examples or min(MAX_EXAMPLES, available)
    if examples > available:
        raise UsageError(
            f"--examples must be at most {available}, the size of the training set; got {examples}"
        )
    learner.model.train(config.batchnorm == "batch")
    weights = config.weights or "evaluation"
    with learner.evaluation_weights() if weights == "evaluation" else nullcontext():
        yield Problem(
            learner.model,
            lambda outputs, labels: classification_loss(outputs, labels, run.smoothing),
            {"batch": load_probe_batch(learner.dataset, examples)},
            {"checkpoint": str(checkpoint.path), "step": checkpoint.step, "weights": weights},
        )


@contextmanager
def _name_in_errors(file: Path) -> Iterator[None]:
    """Name the file in errors about its settings; --device comes from the command line."""
    try:
        yield
    except UsageError as error:
        if "--device" in str(error):
            raise
        raise UsageError(f"{file}: {error}") from error


def _load_checkpoint(folder: Path, step: int | None) -> LoadedCheckpoint:
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    checkpoint = checkpoints.load_latest() if step is None else checkpoints.load_step(step)
    if checkpoint is not None:
        for path in checkpoint.damaged:
            print(f"neumann: {path} is damaged; using {checkpoint.path}", file=sys.stderr)
        return checkpoint
    steps = ", ".join(map(str, checkpoints.list_steps()))
    if step is None or not steps:
        raise UsageError(f"{folder} has no checkpoint")
    raise UsageError(f"--step {step}: {folder} has checkpoints of the steps {steps}")


# ---------------------------------------------------------------------- a user's own model


def _call_entry(entry: str, config: SpectrumConfig) -> Problem:
    returned = call_user_function(entry, "--entry")
    match returned:
        case [nn.Module() as model, loss, data] if loss is not None and hasattr(data, "__iter__"):
            source = {"entry": entry}
        case _:
            kind = type(returned).__name__
            if isinstance(returned, tuple | list):
                kind += f" of ({', '.join(type(part).__name__ for part in returned)})"
            raise UsageError(
                f"--entry {entry} must return (model, loss, batch or loader), got {kind}"
            )
    if config.batchnorm == "running":
        model.eval()  # as for a checkpoint: this also turns dropout off
    if not isinstance(data, Tensor | tuple | list | Mapping):
        loader = data if config.examples is None else _first_examples(data, config.examples)
        return Problem(model, loss, {"loader": loader}, source)
    if config.examples is None:
        return Problem(model, loss, {"batch": data}, source)
    raise UsageError("--examples works only with a loader; this --entry returns one batch")


def _first_examples(loader: Any, examples: int) -> Iterator[Any]:
    """Yield whole batches until they hold enough examples."""
    seen = 0
    for batch in loader:
        yield batch
        seen += count_examples(batch)
        if seen >= examples:
            return
