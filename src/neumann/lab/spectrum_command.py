"""`neumann spectrum`: the curvature of a checkpoint's loss, or of a model of one's own.

`measured(config, watch)` takes the settings to a record of plain values: λ_min and λ_max with their
errors, the paper's μ and η for them, on request the density of eigenvalues with trace and Frobenius
norm, and what all of it was measured on. `write` keeps it as JSON, which the plot is drawn from.

How it fails: UsageError, in one line, for what was asked for and cannot be: no such checkpoint, no
parameter of this name, a model that cannot be differentiated twice, products that are not finite,
whatever the user's own loss or model raises.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from neumann.lab import plain_json
from neumann.lab.curvature import about_plain
from neumann.lab.entries import in_users_code, told
from neumann.lab.environment import environment
from neumann.lab.errors import UsageError, shorten, unknown
from neumann.lab.files import reason, write_aside
from neumann.lab.subjects import Subject, Weights, of_checkpoint, of_entry
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
from neumann.spectrum.precision import without_tf32
from neumann.spectrum.state import batchnorm_layers

Observe = Callable[[int, float, float], object]  # products, smallest and largest Ritz value
Watch = Callable[[int, str], AbstractContextManager[Observe]]  # products at most, and a title

FORMAT = 1
PROBES, STEPS = 8, 80  # of a density
CHUNK = 512  # examples that go through a model at a time where nothing mixes them
ENTRY = (
    "instead of --checkpoint: MODULE:FUNCTION, importable from the working folder. Called without "
    "arguments it returns (model, loss, data). loss(outputs, targets) is the mean over a batch of "
    "pairs, or a neumann.spectrum.Objective. data is one batch (a tensor, tuple, list or mapping "
    "of tensors) or any other iterable of batches. The model is measured in the mode it is in, "
    "but with --batchnorm running in that of evaluation"
)
OPERATORS: dict[str, type[CurvatureOperator]] = {
    "hessian": Hessian,
    "gauss-newton": GaussNewton,
    "differences": Differences,
}


@dataclass(frozen=True)
class SpectrumConfig:
    """Extreme eigenvalues of a loss's curvature, with errors that hold; and their density."""

    checkpoint: Path | None = None
    """folder of a run, whose model, data and last checkpoint are taken"""
    step: int | None = None
    """of the checkpoint, where it is not the last"""
    weights: Weights | None = None
    """of the checkpoint: evaluation, the default, is what is shipped (of Neumann w − μm), training
    is w"""
    data_dir: Path | None = None
    """folder of the run's data set, where it is another by now"""
    entry: Annotated[str | None, tyro.conf.arg(help=ENTRY)] = None
    examples: int | None = None
    """training examples of a checkpoint, by default up to 512; of --entry's loader, all"""
    operator: Literal["hessian", "gauss-newton", "differences"] = "hessian"
    """the matrix: the Hessian, Gauss-Newton, or the Hessian by differences of gradients"""
    batchnorm: Literal["batch", "running"] = "batch"
    """statistics of BatchNorm: of the batch as in training, or the running ones"""
    chunk: int | None = None
    """examples at a time, to bound the memory; by default 512 where no BatchNorm mixes them"""
    weight_decay: float = 0.0
    """include that of an L2 penalty"""
    parameters: tuple[str, ...] = ()
    """patterns of parameter names, as in *.weight; by default all"""
    tolerance: float = 1e-3
    """error of both ends to reach, as a share of the largest eigenvalue in size"""
    max_products: int = 400
    """products with the matrix that may be spent on the ends"""
    density: bool = False
    """also the density of eigenvalues, trace and Frobenius norm"""
    probes: int | None = None
    """random starts of the density, by default 8"""
    steps: int | None = None
    """Lanczos steps of each, by default 80"""
    seed: int = 0
    """of the random starts"""
    device: str | None = None
    """of a checkpoint's model: cpu, cuda, cuda:N, or auto, the default: a GPU where there is one"""
    output: Path | None = None
    """JSON file; by default spectrum.json in the run's folder, or here. The plot lies beside it"""

    def check(self) -> None:
        """Refuse what cannot work."""
        if (self.checkpoint is None) == (self.entry is None):
            given = "neither" if self.entry is None else "both"
            raise UsageError(f"give either --checkpoint or --entry, got {given}")
        for name in ("step", "data_dir", "weights", "device"):
            if self.entry is not None and getattr(self, name) is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')} is for --checkpoint, not for --entry, whose model "
                    "is measured as the function gives it"
                )
        for name, least in (
            ("step", 0),
            ("examples", 1),
            ("chunk", 1),
            ("max_products", 1),
            ("probes", 2),
            ("steps", 1),
            ("weight_decay", 0),
            ("tolerance", 0),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value < float("inf"):
                raise UsageError(
                    f"--{name.replace('_', '-')} must be at least {least}, got {value}"
                )
        for name in ("probes", "steps"):
            if not self.density and getattr(self, name) is not None:
                raise UsageError(f"--{name} is for the density: give --density too")

    @property
    def file(self) -> Path:
        """Where the record goes."""
        if self.output is not None:
            return self.output
        return (self.checkpoint or Path()) / "spectrum.json"


def measured(config: SpectrumConfig, watch: Watch) -> dict[str, Any]:
    """The record of a measurement."""
    config.check()
    with _subject(config) as subject:
        try:
            operator = _operator(config, subject)
            with without_tf32(operator.device), operator.session():
                with watch(min(config.max_products, operator.size), "ends") as observe:
                    found = extremes(
                        operator,
                        tolerance=config.tolerance,
                        max_products=config.max_products,
                        seed=config.seed,
                        observe=observe,
                    )
                spread = _density(config, operator, watch) if config.density else None
        except UsageError:
            raise
        except torch.OutOfMemoryError as error:
            raise UsageError(
                "the device has not the memory; fewer --examples, a smaller --chunk or fewer "
                f"--max-products need less: {shorten(error, 120)}"
            ) from error
        except Exception as error:
            if config.entry is not None and in_users_code(error):
                raise UsageError(f"--entry {config.entry}: {told(error)}") from error
            if isinstance(error, ValueError | TypeError | RuntimeError | ArithmeticError):
                raise UsageError(shorten(error, 400)) from error
            raise  # a fault of ours
    return {
        "format": FORMAT,
        "source": subject.source,
        "about": about_plain(found.about)
        | {"examples": found.about.examples, "names": list(found.about.names)},
        "extremes": _plain_extremes(found),
        "coefficients": _coefficients(found),
        "density": None if spread is None else _plain_density(spread),
        "environment": environment(),
    }


def write(record: dict[str, Any], path: Path) -> None:
    """Keep the record."""
    content = plain_json.dumps(record, indent=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_aside(path, [content])
    except OSError as error:
        raise UsageError(f"cannot write {path}: {reason(error)}") from error


@contextmanager
def _subject(config: SpectrumConfig) -> Iterator[Subject]:
    if config.entry is not None:
        subject = of_entry(config.entry, config.examples)
        if config.batchnorm == "running":
            subject.model.eval()  # as of a checkpoint: dropout is off as well
        yield subject
        return
    assert config.checkpoint is not None
    with of_checkpoint(
        config.checkpoint,
        step=config.step,
        weights=config.weights or "evaluation",
        examples=config.examples,
        training_mode=config.batchnorm == "batch",
        device=config.device or "auto",
        data_dir=config.data_dir,
    ) as subject:
        yield subject


def _operator(config: SpectrumConfig, subject: Subject) -> CurvatureOperator:
    names = [name for name, p in subject.model.named_parameters() if p.requires_grad]
    for pattern in config.parameters:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise unknown("--parameters", pattern, names)
    chunk = config.chunk
    if chunk is None and subject.batch is not None and config.entry is None:
        mixes = config.batchnorm == "batch" and batchnorm_layers(subject.model)
        chunk = None if mixes or (config.examples or 0) <= CHUNK else CHUNK
    options: dict[str, Any] = {
        "batch": subject.batch,
        "loader": subject.loader,
        "batchnorm": config.batchnorm,
        "chunk": chunk,
        "weight_decay": config.weight_decay,
        "parameters": config.parameters or None,
    }
    return OPERATORS[config.operator](subject.model, subject.loss, **options)


def _density(config: SpectrumConfig, operator: CurvatureOperator, watch: Watch) -> Density:
    probes, steps = config.probes or PROBES, config.steps or STEPS
    with watch(probes * min(steps, operator.size), "density") as observe:
        return density(
            operator,
            probes=probes,
            steps=steps,
            seed=config.seed + 1,  # the run for the ends had that of the seed itself
            observe=observe,
        )


def _plain_extremes(found: Extremes) -> dict[str, Any]:
    plain = found.as_dict()
    del plain["about"]
    return plain


def _coefficients(found: Extremes) -> dict[str, Any]:
    """The paper's, for the values and for numbers outside the spectrum; None where there is none.

    Those for the values leave B̂ with a negative eigenvalue wherever a value lies inside.
    """
    values = found.smallest.value, found.largest.value
    plain: dict[str, Any] = {}
    for name, (smallest, largest) in (("values", values), ("outside", found.outside)):
        try:
            plain[name] = dataclasses.asdict(coefficients(smallest, largest))
        except ValueError:
            plain[name] = None
    return plain


def _plain_density(found: Density) -> dict[str, Any]:
    tensors = ("points", "density", "lower", "upper")
    return {
        **{name: getattr(found, name).tolist() for name in tensors},
        "width": found.width,
        "nodes": [nodes.tolist() for nodes in found.nodes],
        "weights": [weights.tolist() for weights in found.weights],
        "trace": dataclasses.asdict(found.trace),
        "frobenius": dataclasses.asdict(found.frobenius),
        "confidence": found.confidence,
        "probes": found.probes,
        "products": found.products,
    }
