"""What a training is: one frozen, flat record, from flags or a TOML file, saved with the run.

Nothing is decided twice: `resolve` turns "automatic" into what it means on this machine, and the
resolved record is what the run's folder keeps and what can be run again.
"""

import dataclasses
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from neumann.lab.errors import UsageError, missing_package, unknown
from neumann.lab.optimizers import RECIPES, Arm
from neumann.lab.schedules import SCHEDULES, Schedule

Switch = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Settings:
    """What every run of a command has in common."""

    data: str = "digits"
    """digits, fashion-mnist, cifar10, cifar100, text:FILE, folder:PATH or synthetic:SHAPE,CLASSES,N
    """
    data_dir: Path | None = None
    """folder of the data set's files"""
    download: bool = False
    """fetch the data set into --data-dir"""
    flip: bool | None = None
    """mirror training images at random; by default what is usual for the data set"""
    shift: int | None = None
    """shift training images by up to this many pixels; by default what is usual"""
    cutout: int | None = None
    """blank a square of this many pixels in training images; by default what is usual"""
    img_size: int = 224
    """pixels of the square that images of a folder are brought to"""
    context: int = 128
    """characters that a model of text reads at once"""
    model: str = "mlp"
    """mlp, cnn, resnet9, resnet18, gru, gpt, or timm:NAME"""
    weight_decay: float = 0.0
    """weight decay, in the form the optimizer has"""
    batch_size: int = 64
    """examples in an optimizer step"""
    micro_batch_size: int | None = None
    """examples a process takes at once; gradients are accumulated to the whole batch"""
    bn_batch: int | None = None
    """examples BatchNorm normalises over (ghost batches); by default all a process takes at once"""
    sync_bn: bool = False
    """BatchNorm normalises over what all processes take at once"""
    epochs: int = 20
    """passes over the training set"""
    sched: Schedule = "linear"
    """learning rate after the ramp"""
    ramp_epochs: float = 0.0
    """epochs in which the learning rate rises to its peak"""
    smoothing: float = 0.0
    """label smoothing"""
    output: Path | None = None
    """folder of the records; by default a new one under runs/"""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is a GPU where there is one"""
    amp: Literal["auto", "bf16", "off"] = "auto"
    """autocast; auto is bf16 on a GPU"""
    channels_last: Switch = "auto"
    """memory format of images; auto is on for a GPU"""
    compile: Switch = "auto"
    """torch.compile the model; auto is on for a GPU"""
    cuda_graph: Switch = "auto"
    """replay a step's forward and backward pass as one CUDA graph; auto is on where it can be"""
    fsdp: bool = False
    """shard the model over the processes (FSDP2) instead of copying it (DDP)"""
    workers: int | None = None
    """processes that load image folders; by default one a CPU, at most 8"""
    eval_every: int = 1
    """epochs between evaluations; the last epoch is always evaluated"""
    log_every: int = 50
    """optimizer steps between lines of the records"""
    tensorboard: bool = False
    """also write the records for TensorBoard, into the run's folder"""
    checkpoint_every: int = 1
    """epochs between checkpoints; 0: only at the end and when interrupted"""
    target: float | None = None
    """accuracy in % to note the first time of"""
    held_out: bool = False
    """evaluate on a tenth of the training set, which is not trained on, instead of the test set"""

    def check(self) -> None:
        """Refuse what cannot work."""
        for name, least in (
            ("batch_size", 1),
            ("epochs", 1),
            ("eval_every", 1),
            ("log_every", 1),
            ("checkpoint_every", 0),
            ("workers", 0),
            ("micro_batch_size", 1),
            ("bn_batch", 2),
            ("img_size", 1),
            ("context", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{flag(name)} must be at least {least}, got {value}")
        if self.sched not in SCHEDULES:
            raise unknown("--sched", self.sched, SCHEDULES)
        if not 0 <= self.ramp_epochs <= self.epochs:
            raise UsageError(
                f"--ramp-epochs must be between 0 and --epochs ({self.epochs}), "
                f"got {self.ramp_epochs:g}"
            )
        if self.output is not None and self.output == Path():
            raise UsageError("--output must be a folder of its own, not the working folder")
        if self.tensorboard and find_spec("tensorboard") is None:
            raise missing_package("tensorboard", "tensorboard", "--tensorboard")
        if self.bn_batch is not None and self.sync_bn:
            raise UsageError("--bn-batch and --sync-bn exclude each other")
        if not 0 <= self.smoothing < 1:
            raise UsageError(f"--smoothing must be in [0, 1), got {self.smoothing:g}")

    @property
    def title(self) -> str:
        """What is trained, in short."""
        return f"{self.data}-{self.model}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and TOML."""
        return {
            key: str(value) if isinstance(value, Path) else value
            for key, value in dataclasses.asdict(self).items()
        }


@dataclass(frozen=True)
class RatedSettings(Settings):
    """The same, and a learning rate."""

    lr: float | None = None
    """peak learning rate where the optimizer's own options name none; by default its usual one"""
    spectrum_every: int = 0
    """optimizer steps between measurements of the loss's extreme curvature; 0: none"""
    spectrum_batch: int | None = None
    """examples of such a measurement; by default the batch size, at most 512"""
    spectrum_products: int = 100
    """Hessian products that a measurement may take"""

    def check(self) -> None:
        """Refuse what cannot work."""
        super().check()
        for name, least in (("spectrum_every", 0), ("spectrum_batch", 1), ("spectrum_products", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{flag(name)} must be at least {least}, got {value}")
        if self.spectrum_every and self.fsdp:
            raise UsageError("--spectrum-every needs whole weights in a process: not with --fsdp")
        if self.lr is not None and not self.lr >= 0:
            raise UsageError(f"--lr must be at least 0, got {self.lr:g}")


@dataclass(frozen=True)
class TrainConfig(RatedSettings):
    """Train one network once."""

    opt: str = "neumann"
    """the optimizer, with options as in neumann:momentum=0.8,cubic=0"""
    seed: int = 0
    """of initial weights, data order and augmentation"""
    resume: Literal["never", "auto"] = "never"
    """auto: continue the run in --output from its last checkpoint"""

    @property
    def title(self) -> str:
        """What is trained, in short."""
        return f"{super().title}-{Arm.parse(self.opt).name}-seed{self.seed}"

    def resolve(self, ranks: int = 1) -> "TrainConfig":
        """The same with "automatic" replaced by what it means here; refuses what cannot work.

        Args:
            ranks: processes that train together.
        """
        device = _device(self.device)
        on_gpu = device.type == "cuda"
        self.check()
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"--seed must be from 0 to {2**32 - 1}, got {self.seed}")
        if self.sync_bn and not on_gpu:
            raise UsageError("--sync-bn needs a GPU: torch synchronises BatchNorm on CUDA alone")
        if self.spectrum_every and self.sync_bn and ranks > 1:
            raise UsageError(
                "--spectrum-every measures in one process, which --sync-bn does not let run alone"
            )
        arm = Arm.parse(self.opt)
        arm.check()
        if self.fsdp and not RECIPES[arm.name].sharded:
            raise UsageError(f"--fsdp: {arm.name} does not take sharded weights")
        at_once = self.micro_batch_size is None or self.micro_batch_size >= self.batch_size
        capturable = on_gpu and ranks == 1 and at_once
        if self.cuda_graph == "on" and not capturable:
            raise UsageError(
                "--cuda-graph on needs a GPU, one process and a batch taken at once "
                "(no --micro-batch-size)"
            )
        return dataclasses.replace(
            self,
            device=str(device),
            lr=arm.lr(self.lr),
            amp=("bf16" if on_gpu else "off") if self.amp == "auto" else self.amp,
            channels_last=_resolved(self.channels_last, on_gpu),
            compile=_resolved(self.compile, on_gpu and not self.fsdp),
            cuda_graph=_resolved(self.cuda_graph, capturable),
        )


# What says where and how a run is kept, not what it computes: a run may be continued with others.
KEEPING = ("output", "resume", "download", "workers", "tensorboard")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: torch finds no CUDA device here")
    return device


def _resolved(switch: Switch, automatic: bool) -> Switch:
    if switch == "auto":
        return "on" if automatic else "off"
    return switch


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
