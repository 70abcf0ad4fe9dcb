"""The settings of a training run: one frozen, flat dataclass, filled from flags or a TOML file.

`TrainConfig.resolve` replaces each "auto" by its meaning on this machine and refuses settings that
cannot work (UsageError). The run saves the result, from which it can be repeated.
"""

import dataclasses
import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from typing_extensions import Doc

from neumann.lab.data.dataset import is_text
from neumann.lab.data.load import DATASETS
from neumann.lab.data.tokens import Tokens
from neumann.lab.errors import UsageError, missing_package, require
from neumann.lab.lengths import Length
from neumann.lab.lr_schedules import Schedule
from neumann.lab.metrics import Metric, choose_metric
from neumann.lab.models.build import FORMS, MODELS
from neumann.lab.optimizers.arm_recipes import RECIPES
from neumann.lab.optimizers.arms import Arm, check_arm

Switch = Literal["auto", "on", "off"]
# Settings that say how a run is stored, not what it computes. They may change when it is resumed.
BOOKKEEPING = ("output", "resume", "download", "workers", "tensorboard", "checkpoint_steps")
DATA_HELP = ", ".join(DATASETS)
MODEL_HELP = ", ".join([*MODELS, *FORMS])
OPT_HELP = (
    f"{', '.join(RECIPES)}; --opt help explains them. Options follow a colon: "
    "neumann-spectral:weight_decay=auto, or, as shares of the run, neumann:warmup=2.2%,reset=4.4%"
)
SCHED_HELP = (
    "learning rate after the ramp: constant, linear, power:EXPONENT ((1 − t)^0.7 by default), "
    "cosine, step:FACTOR,LENGTH (× 0.3 every 40 epochs by default; LENGTH as in 17.7% or 2ep), "
    "inverse:LENGTH (1/(1 + t), half the peak after LENGTH, 1ep by default), "
    "rescaled (× 0.3 at 2/7, 4/7 and 6/7 of the steps after the ramp)"
)


@dataclass(frozen=True)
class Settings:
    """The settings that all runs of a command share. The comments are the help of the flags."""

    data: Annotated[str, Doc(DATA_HELP)] = "digits"
    data_dir: Path | None = None  # folder of the data set's files
    download: bool = False  # fetch the data set into --data-dir
    # mirror training images at random; the default depends on the data set
    flip: bool | None = None
    # shift training images by up to this many pixels; the default depends on the data set
    shift: int | None = None
    # blank out a square of this size in training images; the default depends on the data set
    cutout: int | None = None
    img_size: int = 224  # resize images of a folder to squares of this many pixels a side
    context: int = 128  # characters, bytes or tokens that a text model reads at once
    # how text is split into tokens: chars, bytes, or bpe:N for a vocabulary of N tokens
    tokens: str = "chars"
    model: Annotated[str, Doc(MODEL_HELP)] = "mlp"
    weight_decay: float = 0.0  # weight decay; the optimizer decides whether it is decoupled
    batch_size: int = 64  # examples per optimizer step
    # examples per forward and backward pass of a process; gradients accumulate over the batch
    micro_batch_size: int | None = None
    # examples that BatchNorm normalizes over (ghost batches); by default a whole micro-batch
    bn_batch: int | None = None
    sync_bn: bool = False  # BatchNorm normalizes over the micro-batches of all processes
    epochs: int = 20  # passes over the training set
    sched: Annotated[str, Doc(SCHED_HELP)] = "linear"
    # how long the learning rate rises to its peak: 2.2% (of the run), 5ep (epochs) or 100 (steps)
    ramp: str | None = None
    ramp_epochs: float = 0.0  # the same in epochs
    smoothing: float = 0.0  # label smoothing
    # clip the gradient of a step to this norm over all weights
    clip_grad: float | None = None
    # evaluate a moving average of the weights, with this decay, such as 0.9999
    ema: float | None = None
    output: Path | None = None  # folder for the records; by default a new one under runs/
    device: str = "auto"  # cpu, cuda or cuda:N; auto is a GPU if there is one
    amp: Literal["auto", "bf16", "off"] = "auto"  # autocast; auto is bf16 on a GPU
    channels_last: Switch = "auto"  # memory format of images; auto is on with a GPU
    compile: Switch = "auto"  # torch.compile the model; auto is on with a GPU
    # replay forward and backward pass as one CUDA graph; auto is on where that is possible
    cuda_graph: Switch = "auto"
    fsdp: bool = False  # shard the model over the processes (FSDP2) instead of copying it (DDP)
    # processes that load image folders; by default one per CPU, at most 8
    workers: int | None = None
    eval_every: int = 1  # epochs between evaluations; the last epoch is always evaluated
    # steps between evaluations inside an epoch, for long epochs such as those of text; 0: none
    eval_steps: int = 0
    log_every: int = 50  # optimizer steps between logged lines
    tensorboard: bool = False  # also write the records for TensorBoard, into the run's folder
    checkpoint_every: int = 1  # epochs between checkpoints; 0: only at the end and on interruption
    checkpoint_steps: int = 0  # steps between checkpoints inside an epoch; 0: none
    # accuracy in %, or loss in nats per token for text; the first evaluation that reaches it is
    # recorded
    target: float | None = None
    # evaluate on the validation set, or a tenth of the training set, instead of the test set
    held_out: bool = False

    def check(self) -> None:
        """Raise a UsageError for settings that cannot work."""
        check_at_least(self, batch_size=1, epochs=1, eval_every=1, log_every=1, micro_batch_size=1)
        check_at_least(self, img_size=1, context=1, checkpoint_every=0, workers=0, bn_batch=2)
        check_at_least(self, eval_steps=0, checkpoint_steps=0)
        Tokens.parse(self.tokens)
        Schedule.parse(self.sched)
        if self.tensorboard and find_spec("tensorboard") is None:
            raise missing_package("tensorboard", "tensorboard", "--tensorboard")
        self._check_ramp()
        require(self.output != Path(), "--output must not be the working folder itself")
        require(not (self.bn_batch and self.sync_bn), "--bn-batch and --sync-bn cannot be combined")
        require(0 <= self.smoothing < 1, f"--smoothing must be in [0, 1), got {self.smoothing:g}")
        good = 0 <= self.weight_decay < math.inf
        require(good, f"--weight-decay must be a number of at least 0, got {self.weight_decay:g}")
        decays = self.ema is None or 0 < self.ema < 1
        require(decays, f"--ema must be a decay between 0 and 1, such as 0.9999; got {self.ema}")
        clip = self.clip_grad
        positive = clip is None or 0 < clip < math.inf
        require(positive, f"--clip-grad must be a norm above 0, got {clip}")
        if self.target is not None:
            good, kind = math.isfinite(self.target), "a number, such as 95"
            if is_text(self.data):
                good, kind = 0 < self.target < math.inf, "a loss in nats per token, such as 3.5"
            require(good, f"--target must be {kind}; got {self.target:g}")

    def _check_ramp(self) -> None:
        ramp = self.ramp_epochs
        between = f"between 0 and --epochs ({self.epochs})"
        require(0 <= ramp <= self.epochs, f"--ramp-epochs must be {between}, got {ramp:g}")
        if self.ramp is not None:
            require(ramp == 0, "--ramp and --ramp-epochs cannot be combined")
            length = Length.parse("--ramp", self.ramp)
            fits = length.unit != "ep" or length.number <= self.epochs
            require(fits, f"--ramp must be {between}, got {self.ramp}")

    def count_ramp_steps(self, total_steps: int, steps_per_epoch: int) -> int:
        """Return the number of steps in which the learning rate rises."""
        if self.ramp is None:
            return round(self.ramp_epochs * steps_per_epoch)
        return Length.parse("--ramp", self.ramp).count_steps(total_steps, steps_per_epoch)

    @property
    def metric(self) -> Metric:
        """What runs are scored by."""
        return choose_metric({"data": self.data, "tokens": self.tokens})

    @property
    def title(self) -> str:
        """A short name for what is trained."""
        return f"{self.data}-{self.model}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON and TOML."""
        items = dataclasses.asdict(self).items()
        return {key: str(value) if isinstance(value, Path) else value for key, value in items}

    def as_record(self) -> dict[str, Any]:
        """Return the settings that decide what a run computes, as its config.json holds them."""
        return {key: value for key, value in self.as_dict().items() if key not in BOOKKEEPING}


@dataclass(frozen=True)
class TrainingSettings(Settings):
    """Settings of runs at one learning rate per arm, with measurements of the curvature."""

    # peak learning rate, unless the optimizer's options name one; by default the optimizer's own
    lr: float | None = None
    # optimizer steps between measurements of the Hessian's extreme eigenvalues; 0: none
    spectrum_every: int = 0
    # examples per measurement; by default the batch size, at most 512
    spectrum_batch: int | None = None
    spectrum_products: int = 100  # at most this many Hessian products per measurement

    def check(self) -> None:
        super().check()
        check_at_least(self, spectrum_every=0, spectrum_batch=1, spectrum_products=1)
        good = self.lr is None or 0 <= self.lr < math.inf
        require(good, f"--lr must be a number of at least 0, got {self.lr}")
        if self.spectrum_every and self.fsdp:
            raise UsageError("--spectrum-every needs unsharded weights: leave out --fsdp")


@dataclass(frozen=True)
class TrainConfig(TrainingSettings):
    """Train one network with one optimizer."""

    opt: Annotated[str, Doc(OPT_HELP)] = "neumann"
    seed: int = 0  # seed of initial weights, data order and augmentation
    # auto: continue the run in --output from its last checkpoint
    resume: Literal["never", "auto"] = "never"

    @property
    def title(self) -> str:
        return f"{super().title}-{Arm.parse(self.opt).name}-seed{self.seed}"

    def resolve(self, ranks: int = 1) -> "TrainConfig":
        """Replace each "auto" by its meaning for this many processes on this machine."""
        device = _find_device(self.device)
        on_gpu = device.type == "cuda"
        self.check()
        require(0 <= self.seed < 2**32, f"--seed must be from 0 to {2**32 - 1}, got {self.seed}")
        if self.sync_bn:
            require(on_gpu, "--sync-bn needs a GPU: torch synchronizes BatchNorm on CUDA only")
            alone = "--spectrum-every measures in one process alone, which --sync-bn does not allow"
            require(not self.spectrum_every or ranks == 1, alone)
        arm = Arm.parse(self.opt).on(self.data)
        check_arm(arm)
        recipe = arm.recipe
        can_shard = not self.fsdp or recipe.sharded
        require(can_shard, f"--fsdp: {arm.name} does not support sharded weights")
        clips = recipe.inner_loop and self.clip_grad is not None
        require(
            not clips, f"--clip-grad: {arm.name} uses several gradients per step and cannot clip"
        )
        twice = recipe.differentiates_twice
        can_synchronize = not (twice and self.sync_bn) or ranks == 1
        refusal = f"--sync-bn: {arm.name} needs second derivatives, which SyncBatchNorm lacks"
        require(can_synchronize, refusal)
        at_once = self.micro_batch_size is None or self.micro_batch_size >= self.batch_size
        capturable = on_gpu and ranks == 1 and at_once and not twice
        whole = (
            "a GPU, one process, no --micro-batch-size below --batch-size, and an --opt other "
            "than cg"
        )
        require(self.cuda_graph != "on" or capturable, f"--cuda-graph on needs {whole}")
        return dataclasses.replace(
            self,
            device=str(device),
            lr=arm.lr(self.lr),
            amp=("bf16" if on_gpu else "off") if self.amp == "auto" else self.amp,
            channels_last=_resolve_switch(self.channels_last, on_gpu),
            compile=_resolve_switch(self.compile, on_gpu and not self.fsdp),
            cuda_graph=_resolve_switch(self.cuda_graph, capturable),
        )


def _find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    known = device.type in ("cpu", "cuda")
    require(known, f"--device must be auto, cpu, cuda or cuda:N, got {name!r}")
    usable = device.type == "cpu" or torch.cuda.is_available()
    require(usable, f"--device {name}: torch finds no CUDA device here")
    return device


def _resolve_switch(switch: Switch, automatic: bool) -> Switch:
    return switch if switch != "auto" else "on" if automatic else "off"


def check_at_least(config: object, **bounds: int) -> None:
    """Raise a UsageError unless each setting is None, or finite and at least its bound."""
    for name, least in bounds.items():
        value = getattr(config, name)
        if value is not None and not least <= value < math.inf:
            raise UsageError(f"{flag_name(name)} must be at least {least}, got {value}")


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")
