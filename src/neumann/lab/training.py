"""One training: from a resolved configuration to a folder of records.

Every step's data, augmentation and learning rate are functions of the step, and a checkpoint holds
all that is not: weights, optimizer, random generators, sums not yet written. So a run resumed from
any checkpoint writes, on a CPU, the bits of one that was never interrupted.

The host does not wait for the device in a step: losses are summed there, and the first step whose
loss was not finite is noted there and read with them, every `log_every` steps. Evaluation is at the
optimizer's evaluation weights and outside the training clock.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neumann.lab.checkpoints import Checkpoints
from neumann.lab.config import KEEPING, TrainConfig
from neumann.lab.data import Dataset, Plan, load
from neumann.lab.errors import UsageError
from neumann.lab.evaluation import Score, evaluate, has_batchnorm, kept_statistics
from neumann.lab.generators import restore_rng, rng_state
from neumann.lab.interruption import Interrupted, noticed
from neumann.lab.models import build as build_model
from neumann.lab.models import classification_loss
from neumann.lab.optimizers import Arm, evaluating
from neumann.lab.optimizers import build as build_optimizer
from neumann.lab.processes import Process
from neumann.lab.reading import read_summary
from neumann.lab.records import Records
from neumann.lab.schedules import factor
from neumann.optim import Neumann, recalibrate_batchnorm

RECALIBRATION_EXAMPLES = 5_000

Observer = Callable[[dict[str, Any]], None]


class Diverged(RuntimeError):
    """The loss was not finite. The run's summary says so too, and has no accuracy."""

    def __init__(self, step: int, lr: float, checkpoint: str | None) -> None:
        self.step, self.lr, self.checkpoint = step, lr, checkpoint
        where = f"the last good checkpoint is {checkpoint}" if checkpoint else "no checkpoint"
        super().__init__(f"the loss was not finite in step {step} at lr {lr:g}; {where}")

    def as_dict(self) -> dict[str, Any]:
        """What the summary keeps of it."""
        return {"diverged": {"step": self.step, "lr": self.lr, "checkpoint": self.checkpoint}}


@dataclasses.dataclass(frozen=True)
class Summary:
    """How a run ended."""

    accuracy: float  # %, at the evaluation weights after the last step
    accuracy_recalibrated: float | None  # %, with BatchNorm statistics gathered at those weights
    loss: float  # nats, on the evaluated split
    train_loss: float  # nats, mean over the last epoch
    steps: int
    seconds: float  # of training alone
    steps_to_target: int | None
    epochs_to_target: float | None


class Training:
    """A run in the making. Build it, then :meth:`run` it once."""

    def __init__(self, config: TrainConfig, process: Process, dataset: Dataset | None = None):
        self.config = config
        self.process = process
        self.device = torch.device(config.device)
        self.dataset = dataset or open_dataset(config)
        self.steps_per_epoch = self._plan(0).batches_of(len(self.dataset.train))
        self.total_steps = config.epochs * self.steps_per_epoch
        torch.manual_seed(config.seed)
        self.model: nn.Module = build_model(config.model, self.dataset).to(self.device)
        if config.channels_last == "on" and self.dataset.kind == "image":
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._forward = torch.compile(self.model) if config.compile == "on" else self.model
        self.arm = Arm.parse(config.opt)
        self.optimizer = build_optimizer(
            self.arm,
            self.model,
            lr=config.lr,
            weight_decay=config.weight_decay,
            steps_per_epoch=self.steps_per_epoch,
        )
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.step = 0  # completed
        self._seconds = 0.0
        self._reached: int | None = None
        self._sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # loss, steps
        self._epoch_sums = torch.zeros_like(self._sums)
        self._first_bad = torch.full((), -1, dtype=torch.int64, device=self.device)
        self._last: dict[str, Any] = {}

    # ------------------------------------------------------------------ the run

    def run(self, folder: Path, observe: Observer = lambda line: None) -> Summary:
        """Train to the end, or raise Interrupted or Diverged with everything saved."""
        settings = self.config.as_dict()
        records = Records.create(folder, {k: v for k, v in settings.items() if k not in KEEPING})
        checkpoints = Checkpoints(folder / "checkpoints")
        finished = read_summary(folder)
        if finished is not None and self.config.resume == "auto":
            if "diverged" in finished:
                raise Diverged(**finished["diverged"])
            return Summary(**finished)
        self._resume(records, checkpoints)
        try:
            summary = self._train(records, checkpoints, observe)
        except Diverged as error:
            records.finish(error.as_dict())
            raise
        records.finish(dataclasses.asdict(summary))
        return summary

    def _train(self, records: Records, checkpoints: Checkpoints, observe: Observer) -> Summary:
        begun = time.perf_counter()
        with noticed() as signals:
            while self.step < self.total_steps:
                epoch, first = divmod(self.step, self.steps_per_epoch)
                for pieces in self.dataset.train.batches(self._plan(epoch, first)):
                    self._take_step(pieces)
                    if self.step % self.config.log_every == 0:
                        self._log(records, observe, checkpoints)
                    if signals.number is not None:
                        self._seconds += time.perf_counter() - begun
                        self._save(records, checkpoints)
                        raise Interrupted(signals.number, self.step)
                self._wait()
                self._seconds += time.perf_counter() - begun
                self._end_epoch(epoch, records, observe, checkpoints)
                begun = time.perf_counter()
        return Summary(
            accuracy=self._last["accuracy"],
            accuracy_recalibrated=self._last["accuracy_recalibrated"],
            loss=self._last["loss"],
            train_loss=self._last["train_loss"],
            steps=self.step,
            seconds=self._seconds,
            steps_to_target=self._reached,
            epochs_to_target=None
            if self._reached is None
            else self._reached / self.steps_per_epoch,
        )

    def _take_step(self, pieces: list[tuple[Tensor, Tensor]]) -> None:
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * self._factor(self.step)
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for inputs, labels in pieces:
            with self._autocast():
                loss = classification_loss(self._forward(inputs), labels, self.config.smoothing)
            loss = loss / len(pieces)  # equal pieces
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        self.optimizer.step()
        self.step += 1
        # With device arithmetic: reading it here would make the host wait.
        bad = (~torch.isfinite(total)) & (self._first_bad < 0)
        self._first_bad = torch.where(bad, self.step, self._first_bad)
        self._sums[0] += total
        self._sums[1] += 1

    def _factor(self, step: int) -> float:
        return factor(
            self.config.sched,
            step,
            total_steps=self.total_steps,
            ramp_steps=round(self.config.ramp_epochs * self.steps_per_epoch),
            steps_per_epoch=self.steps_per_epoch,
        )

    # ------------------------------------------------------------------ what is written

    def _log(self, records: Records, observe: Observer, checkpoints: Checkpoints) -> None:
        """A line for the steps since the last one."""
        self._check_finite(checkpoints)
        loss, steps = self._sums.tolist()
        self._epoch_sums += self._sums
        self._sums.zero_()
        if steps == 0:
            return
        line: dict[str, Any] = {
            "kind": "step",
            "step": self.step,
            "epoch": self.step / self.steps_per_epoch,
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "train_loss": loss / steps,
        }
        if isinstance(self.optimizer, Neumann):
            line["optimizer"] = self.optimizer.diagnostics().as_dict()
        self._write(records, observe, line)

    def _end_epoch(
        self, epoch: int, records: Records, observe: Observer, checkpoints: Checkpoints
    ) -> None:
        self._log(records, observe, checkpoints)
        loss, steps = self._epoch_sums.tolist()
        self._epoch_sums.zero_()
        done = epoch + 1
        line: dict[str, Any] = {
            "kind": "epoch",
            "step": self.step,
            "epoch": done,
            "train_loss": loss / steps,
            "seconds": self._seconds,
        }
        if done % self.config.eval_every == 0 or done == self.config.epochs:
            score, recalibrated = self._evaluate()
            line |= {
                "loss": score.loss,
                "accuracy": score.accuracy,
                "accuracy_recalibrated": None if recalibrated is None else recalibrated.accuracy,
            }
            target = self.config.target
            if target is not None and self._reached is None and score.accuracy >= target:
                self._reached = self.step
        self._write(records, observe, line)
        self._last = {**self._last, **line}
        every = self.config.checkpoint_every
        if done == self.config.epochs or (every and done % every == 0):
            self._save(records, checkpoints)

    def _write(self, records: Records, observe: Observer, line: dict[str, Any]) -> None:
        if self.process.leads:
            records.append(**line)
            observe(line)

    def _evaluate(self) -> tuple[Score, Score | None]:
        """At the evaluation weights, with the running statistics and with recalibrated ones."""
        batch = max(self.config.batch_size, 512)
        arguments = (self.dataset.test, batch, self.process, self._autocast())
        with evaluating(self.optimizer):
            score = evaluate(self.model, *arguments)
            if not has_batchnorm(self.model):
                return score, None
            batches = -(-RECALIBRATION_EXAMPLES // self.config.batch_size)
            inputs = (
                piece for pieces in self.dataset.train.batches(self._plan(0)) for piece, _ in pieces
            )
            with kept_statistics(self.model):
                with self._autocast():
                    recalibrate_batchnorm(self.model, inputs, batches=batches)
                return score, evaluate(self.model, *arguments)

    # ------------------------------------------------------------------ stopping and going on

    def _save(self, records: Records, checkpoints: Checkpoints) -> None:
        self._check_finite(checkpoints)
        if not self.process.leads:
            return
        records.sync()  # a checkpoint must not know more than the lines
        payload = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": rng_state(),
            "sums": self._sums,
            "epoch_sums": self._epoch_sums,
            "seconds": self._seconds,
            "reached": self._reached,
            "last": self._last,
        }
        checkpoints.save(self.step, payload)

    def _resume(self, records: Records, checkpoints: Checkpoints) -> None:
        found = checkpoints.latest() if self.config.resume == "auto" else None
        if found is None:
            if checkpoints.latest() is not None:
                raise UsageError(
                    f"{records.folder} holds a run already: --resume auto continues it, another "
                    "--output starts a new one"
                )
            records.rewind(0)
            return
        payload = found.payload
        self.model.load_state_dict(payload["model"])
        self.optimizer.load_state_dict(payload["optimizer"])
        restore_rng(payload["rng"])
        self._sums.copy_(payload["sums"])
        self._epoch_sums.copy_(payload["epoch_sums"])
        self._seconds, self._reached = payload["seconds"], payload["reached"]
        self._last = payload["last"]
        self.step = found.step
        records.rewind(self.step)

    def _check_finite(self, checkpoints: Checkpoints) -> None:
        bad = int(self._first_bad)
        if bad >= 0:
            found = checkpoints.latest()
            lr = self._peaks[0] * self._factor(bad - 1)
            raise Diverged(bad, lr, None if found is None else str(found.path))

    # ------------------------------------------------------------------ small things

    def _plan(self, epoch: int, first: int = 0) -> Plan:
        config, process = self.config, self.process
        share = config.batch_size // process.ranks
        most = config.micro_batch_size or share
        return Plan(
            config.batch_size,
            micro_batches=max(-(-share // most), 1),
            seed=config.seed,
            epoch=epoch,
            first=first,
            rank=process.rank,
            ranks=process.ranks,
        )

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        enabled = self.config.amp == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def open_dataset(config: TrainConfig) -> Dataset:
    """The configuration's data; without its test set where a part is held out."""
    dataset = load(
        config.data,
        data_dir=config.data_dir,
        download=config.download,
        device=torch.device(config.device),
        channels_last=config.channels_last == "on",
        workers=config.workers,
    )
    return dataset.held_out() if config.held_out else dataset
