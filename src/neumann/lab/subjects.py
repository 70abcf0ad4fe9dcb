"""What a spectrum is measured of: a run's checkpoint, or what a function of the user's gives.

From a checkpoint: the model and the data as the run's config.json says, on any device, with the
weights of training (w) or of evaluation (for Neumann w − μm), and training examples that are always
the same. From a function: whatever it returns. UsageError where either cannot be used.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from neumann.lab.checkpoints import Checkpoints, Loaded
from neumann.lab.config import TrainConfig
from neumann.lab.config_files import from_mapping
from neumann.lab.curvature import EXAMPLES, probe_batch
from neumann.lab.entries import made_by
from neumann.lab.errors import UsageError, shorten
from neumann.lab.models import classification_loss
from neumann.lab.networks import Network
from neumann.lab.optimizers import evaluating
from neumann.lab.processes import Process
from neumann.lab.reading import read_config
from neumann.lab.training import Training

Weights = Literal["evaluation", "training"]


@dataclass(frozen=True)
class Subject:
    """A model, its loss, and data."""

    model: nn.Module
    loss: Any  # as the operators of neumann.spectrum take it
    batch: Any  # one of these two is None
    loader: Any
    source: dict[str, Any]  # where it is from, for the record


@contextmanager
def of_checkpoint(
    folder: Path,
    *,
    step: int | None,
    weights: Weights,
    examples: int | None,
    training_mode: bool,
    device: str,
    data_dir: Path | None,
) -> Iterator[Subject]:
    """A run as one of its checkpoints has it; the weights are the subject's inside the block."""
    config = _config(folder, device, data_dir)
    found = _checkpoint(folder, step)
    training = Training(config, Process())
    sharded = bool(read_config(folder).get("fsdp"))  # its state goes by names
    network = Network(training.model, training.model, sharded)
    try:
        network.load(training.optimizer, found.payload)
    except (RuntimeError, ValueError, KeyError) as error:
        raise UsageError(f"{found.path} does not fit {folder}: {shorten(error)}") from error
    examples = examples or min(EXAMPLES, len(training.dataset.train))
    if examples > len(training.dataset.train):
        raise UsageError(
            f"--examples must be at most {len(training.dataset.train)}, the size of the training "
            f"set; got {examples}"
        )
    training.model.train(training_mode)
    with evaluating(training.optimizer) if weights == "evaluation" else nullcontext():
        yield Subject(
            training.model,
            lambda outputs, labels: classification_loss(outputs, labels, config.smoothing),
            probe_batch(training.dataset, examples),
            None,
            {"checkpoint": str(found.path), "step": found.step, "weights": weights},
        )


def _config(folder: Path, device: str, data_dir: Path | None) -> TrainConfig:
    """The run's, for one process on this device and with nothing compiled."""
    config = from_mapping(read_config(folder), TrainConfig)
    plain: dict[str, Any] = {"amp": "off", "channels_last": "off", "compile": "off"}
    plain |= {"cuda_graph": "off", "fsdp": False, "sync_bn": False, "spectrum_every": 0}
    return dataclasses.replace(
        config, device=device, data_dir=data_dir or config.data_dir, **plain
    ).resolve()


def _checkpoint(folder: Path, step: int | None) -> Loaded:
    checkpoints = Checkpoints(folder / "checkpoints")
    found = checkpoints.latest() if step is None else checkpoints.at(step)
    if found is not None:
        return found
    there = ", ".join(map(str, checkpoints.steps()))
    if not there:
        raise UsageError(f"{folder} has no checkpoint")
    raise UsageError(f"--step {step}: {folder} has checkpoints of the steps {there}")


# ---------------------------------------------------------------------- a user's own model


def of_entry(entry: str, examples: int | None) -> Subject:
    """What the function gives: (model, loss, data)."""
    given = made_by(entry, "--entry")
    if not isinstance(given, tuple | list) or len(given) != 3 or not _is_subject(given):
        shape = ", ".join(type(each).__name__ for each in given) if _listed(given) else ""
        raise UsageError(
            f"--entry {entry} must return (model, loss, batch or loader), got "
            f"{type(given).__name__}{f' of ({shape})' if shape else ''}"
        )
    model, loss, data = given
    source = {"entry": entry}
    if is_batch(data):
        if examples is not None:
            raise UsageError(
                "--examples is for a loader; this --entry gives one batch, taken whole"
            )
        return Subject(model, loss, data, None, source)
    loader = data if examples is None else first_examples(data, examples)
    return Subject(model, loss, None, loader, source)


def is_batch(data: Any) -> bool:
    """A tensor, tuple, list or mapping is a batch; what else can be iterated is a loader."""
    return isinstance(data, Tensor | tuple | list | Mapping)


def first_examples(loader: Any, examples: int) -> Iterator[Any]:
    """Whole batches until there are as many examples."""
    from neumann.spectrum.batches import examples_of

    seen = 0
    for batch in loader:
        yield batch
        seen += examples_of(batch)
        if seen >= examples:
            return


def _is_subject(given: Any) -> bool:
    model, loss, data = given
    loads = is_batch(data) or hasattr(data, "__iter__")
    return isinstance(model, torch.nn.Module) and loss is not None and loads


def _listed(given: Any) -> bool:
    return isinstance(given, tuple | list)
