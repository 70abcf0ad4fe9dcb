"""Settings of comparisons, sweeps and spectrum measurements. A field's docstring is its help."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from typing_extensions import Doc

from neumann.lab.config import Settings, TrainConfig, TrainingSettings, check_at_least, flag_name
from neumann.lab.contenders import Contender, get_name
from neumann.lab.errors import UsageError
from neumann.lab.storage.folders import MAX_NAME_BYTES, make_folder_name
from neumann.lab.training.processes import count_processes

ENTRY_HELP = (
    "instead of --checkpoint: MODULE:FUNCTION, importable from the working folder. Called without "
    "arguments, it returns (model, loss, data). loss(outputs, targets) is the mean over a batch "
    "of pairs, or a neumann.spectrum.Objective. data is one batch (a tensor, tuple, list or "
    "mapping of tensors) or any other iterable of batches. The model is measured in the mode it "
    "is in, except that --batchnorm running puts it into evaluation mode"
)


@dataclass(frozen=True)
class CompareConfig(TrainingSettings):
    """Train several optimizers over the same seeds, and report how they differ."""

    arms: tuple[str, ...] = ("neumann-spectral", "neumann", "sgd", "rmsprop", "adam", "adamw")
    """optimizers (--arms help lists them), each with options as in neumann-spectral:lr=0.03,
    settings of its own as in sgd:lr=0.1@sched=step@batch-size=512, and a name as in
    baseline=sgd:lr=0.1; the first is compared with the others"""
    seeds: int = 3
    """runs of each arm; a seed gives all arms the same initial weights and data order"""
    jobs: int = 1
    """runs trained side by side"""
    seconds: float | None = None
    """start no new run after this many seconds; run the same command again to continue"""

    def check(self) -> None:
        super().check()
        _check_arms(self.arms, self.data)
        check_at_least(self, seeds=1, jobs=1, seconds=0)

    @property
    def title(self) -> str:
        return f"{super().title}-compare"

    def make_run_config(self, arm: str, seed: int, output: Path) -> TrainConfig:
        """The settings of one run, which continues if it was started before."""
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(TrainingSettings)}
        contender = Contender.parse(arm)
        own = {**contender.get_own_settings(), "opt": contender.opt}
        run = TrainConfig(**{**shared, **own, "output": output, "seed": seed, "resume": "auto"})
        try:
            return run.resolve(count_processes())
        except UsageError as error:
            if not contender.settings:
                raise
            raise UsageError(f"{arm}: {error}") from None


@dataclass(frozen=True)
class SweepConfig(Settings):
    """Choose each optimizer's learning rate on held-out data, then compare them.

    Search budgets are equal, and only the final comparison sees the test set.
    """

    arms: tuple[str, ...] = ("neumann-spectral", "neumann", "sgd", "adamw")
    """optimizers, with options, settings and names as for compare; one may have its own range, as
    in adamw:lr=1e-4:1e-2:7, or take the rate chosen for another, as in
    neumann-spectral:momentum=0.8,lr=neumann-spectral"""
    lr: str | None = None
    """learning rates to try, log-spaced, LOW:HIGH:COUNT; by default 7 around the usual one"""
    search_seeds: int = 1
    """runs of each learning rate in the search"""
    search_epochs: int | None = None
    """epochs of each run in the search; by default --epochs. An arm's own epochs override both"""
    seeds: int = 3
    """runs of each optimizer in the final comparison"""
    jobs: int = 1
    """runs trained side by side"""
    seconds: float | None = None
    """start no new run after this many seconds; run the same command again to continue"""

    def check(self) -> None:
        """Check everything but the ranges of --lr."""
        super().check()
        _check_arms(self.arms, self.data)
        check_at_least(self, search_seeds=1, search_epochs=1, seeds=1, jobs=1)
        check_at_least(self, seconds=0)
        if self.held_out:
            raise UsageError(
                "--held-out is for train and compare: a sweep always searches on held-out data and "
                "compares on the test set"
            )

    @property
    def title(self) -> str:
        return f"{super().title}-sweep"

    def as_comparison(self, arms: tuple[str, ...], **changes: Any) -> CompareConfig:
        """A comparison of these arms with the settings of this sweep, except for the changes."""
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(Settings)}
        return CompareConfig(**{**shared, "arms": arms, "jobs": self.jobs, **changes})


@dataclass(frozen=True)
class SpectrumConfig:
    """Measure the extreme eigenvalues of a loss's curvature, with error bounds, and their density.

    Give either --checkpoint or --entry.
    """

    checkpoint: Path | None = None
    """folder of a run: measures its model, on its data, at its last checkpoint"""
    step: int | None = None
    """step of the checkpoint; by default the last"""
    weights: Literal["evaluation", "training"] | None = None
    """weights to measure: evaluation (default; w − μm for Neumann) or training (w)"""
    data_dir: Path | None = None
    """folder of the run's data set, if it has moved"""
    entry: Annotated[str | None, Doc(ENTRY_HELP)] = None
    examples: int | None = None
    """training examples to use; by default up to 512 with --checkpoint, all of --entry's loader"""
    operator: Literal["hessian", "gauss-newton", "differences"] = "hessian"
    """the Hessian, the Gauss-Newton matrix, or the Hessian by differences of gradients"""
    batchnorm: Literal["batch", "running"] = "batch"
    """BatchNorm uses the statistics of the batch, as in training, or the running ones"""
    chunk: int | None = None
    """examples at a time, to limit memory; by default 512 unless BatchNorm uses batch statistics"""
    weight_decay: float = 0.0
    """include the curvature of this L2 penalty"""
    parameters: tuple[str, ...] = ()
    """patterns of parameter names, as in *.weight; by default all parameters"""
    tolerance: float = 1e-3
    """error to reach at both ends, relative to the largest eigenvalue in magnitude"""
    max_products: int = 400
    """the most matrix-vector products to spend on the two ends"""
    density: bool = False
    """also estimate the density of eigenvalues, the trace and the Frobenius norm"""
    probes: int | None = None
    """random starting vectors of the density; by default 8"""
    steps: int | None = None
    """Lanczos steps from each starting vector; by default 80"""
    seed: int = 0
    """seed of the random starting vectors"""
    device: str | None = None
    """where to measure a checkpoint: cpu, cuda, cuda:N, or auto (default), a GPU if there is one"""
    allow_code: tyro.conf.SuppressFixed[tyro.conf.Fixed[tuple[str, ...]]] = ()  # from --allow-code
    output: Path | None = None
    """JSON file; by default spectrum.json in the run's folder, or here. The plot goes next to it"""

    def check(self) -> None:
        if (self.checkpoint is None) == (self.entry is None):
            given = "neither" if self.entry is None else "both"
            raise UsageError(f"give either --checkpoint or --entry, got {given}")
        for name in ("step", "data_dir", "weights", "device"):
            if self.entry is not None and getattr(self, name) is not None:
                raise UsageError(
                    f"{flag_name(name)} is for --checkpoint, not for --entry, whose model is "
                    "measured as the function returns it"
                )
        check_at_least(self, step=0, weight_decay=0, tolerance=0, probes=2)
        check_at_least(self, examples=1, chunk=1, max_products=1, steps=1)
        for name in ("probes", "steps"):
            if not self.density and getattr(self, name) is not None:
                raise UsageError(f"--{name} is for the density: add --density")

    @property
    def file(self) -> Path:
        """Where the record goes."""
        return self.output or (self.checkpoint or Path()) / "spectrum.json"


def _check_arms(arms: tuple[str, ...], data: str) -> None:
    if not arms:
        raise UsageError("--arms must name at least one optimizer")
    names = [get_name(arm) for arm in arms]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate:
        raise UsageError(f"--arms names {duplicate} twice")
    folders: dict[str, str] = {}
    for arm, name in zip(arms, names, strict=True):
        Contender.parse(arm).arm.on(data).check()
        folder = make_folder_name(name)
        if len(os.fsencode(folder)) > MAX_NAME_BYTES:
            raise UsageError(
                f"--arms: {name[:40]}… is too long for a folder name ({MAX_NAME_BYTES} bytes)"
            )
        # Some file systems do not distinguish upper and lower case.
        other = folders.setdefault(folder.casefold(), name)
        if other != name:
            raise UsageError(f"--arms: {other!r} and {name!r} would share the folder {folder}")
