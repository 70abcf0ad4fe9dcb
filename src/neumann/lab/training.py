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
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from neumann.lab.batchnorm import (
    average_statistics,
    has_batchnorm,
    kept_statistics,
    restore_statistics,
    statistics,
)
from neumann.lab.checkpoints import Checkpoints
from neumann.lab.clock import Clock
from neumann.lab.config import KEEPING, TrainConfig
from neumann.lab.curvature import Curvature
from neumann.lab.data import Dataset, Plan
from neumann.lab.data.plan import key
from neumann.lab.errors import UsageError
from neumann.lab.evaluation import Score, evaluate
from neumann.lab.generators import restore_rng, rng_state
from neumann.lab.gradients import CapturedGradients, Gradients, Pieces
from neumann.lab.interruption import Interrupted, noticed
from neumann.lab.lines import written
from neumann.lab.losses import Losses
from neumann.lab.models import build as build_model
from neumann.lab.models import classification_loss
from neumann.lab.networks import network
from neumann.lab.opening import open_dataset
from neumann.lab.optimizers import Arm, evaluating
from neumann.lab.optimizers import build as build_optimizer
from neumann.lab.outcome import Diverged, Summary
from neumann.lab.processes import Process, Stopping, gathered, led
from neumann.lab.reading import read_metrics, read_summary
from neumann.lab.records import Records
from neumann.lab.schedules import factor
from neumann.optim import Neumann, recalibrate_batchnorm

__all__ = ["Diverged", "Observer", "Summary", "Training", "open_dataset"]

RECALIBRATION_EXAMPLES = 5_000

Observer = Callable[[dict[str, Any]], None]


class Training:
    """A run in the making. Build it, then :meth:`run` it once."""

    def __init__(self, config: TrainConfig, process: Process, dataset: Dataset | None = None):
        self.config = config
        self.process = process
        self.device = process.device(config.device)
        self.dataset = dataset or open_dataset(config, process)
        self.steps_per_epoch = self._plan(0).batches_of(len(self.dataset.train))
        self.total_steps = config.epochs * self.steps_per_epoch
        torch.manual_seed(config.seed)
        model = build_model(config.model, self.dataset).to(self.device)
        if config.channels_last == "on" and self.dataset.kind == "image":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        pieces = self._plan(0).micro_batches
        self.network = network(model, config, process, config.batch_size // process.ranks // pieces)
        self.model = self.network.model
        self.optimizer = build_optimizer(
            Arm.parse(config.opt),
            self.model,
            lr=config.lr,
            weight_decay=config.weight_decay,
            steps_per_epoch=self.steps_per_epoch,
        )
        self._gradients = self._passes()
        self._curvature = Curvature(config, self.dataset, self.model, self.optimizer)
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.step = 0  # completed
        self.clock = Clock(self.device)
        self._reached: int | None = None
        self._losses = Losses(self.device, process)
        self._last: dict[str, Any] = {}
        if process.ranks > 1:  # what is dropped out differs
            torch.manual_seed(key("process", config.seed, process.rank))

    # ------------------------------------------------------------------ the run

    def run(self, folder: Path, observe: Observer = lambda line: None) -> Summary:
        """Train to the end, or raise Interrupted or Diverged with everything saved."""
        settings = {k: v for k, v in self.config.as_dict().items() if k not in KEEPING}
        with Records(folder) as records:  # which keeps other processes out of the folder
            led(self.process, lambda: records.begin(settings))
            return self._run(folder, records, observe)

    def _run(self, folder: Path, records: Records, observe: Observer) -> Summary:
        checkpoints = Checkpoints(folder / "checkpoints")
        finished = read_summary(folder)
        if self.config.resume != "auto" and (finished is not None or read_metrics(folder)):
            raise UsageError(
                f"{folder} holds a run already: --resume auto continues it, another --output "
                "starts a new one"
            )
        if finished is not None:
            if "diverged" in finished:
                raise Diverged(**finished["diverged"])
            return Summary(**finished)
        self._resume(records, checkpoints)
        try:
            with self._written(records, observe) as write:
                summary = self._train(records, checkpoints, write)
        except Diverged as error:
            failure = error.as_dict()
            led(self.process, lambda: records.finish(failure))
            raise
        finally:
            self._gradients.release()
        led(self.process, lambda: records.finish(dataclasses.asdict(summary)))
        return summary

    def _train(self, records: Records, checkpoints: Checkpoints, write: Observer) -> Summary:
        stopping = Stopping(self.process)
        compiling = not self._gradients.prepared
        with noticed(patient=self.process.ranks > 1) as signals:
            while self.step < self.total_steps:
                epoch, first = divmod(self.step, self.steps_per_epoch)
                self.clock.start()
                for pieces in self.dataset.train.batches(self._plan(epoch, first)):
                    if self.step == 0:
                        self._measure(pieces, write, checkpoints)
                    self._take_step(pieces)
                    if compiling and self._gradients.prepared:
                        compiling = False
                        self.clock.stop(compiled=True)
                    if self.step % self.config.log_every == 0:
                        self._log(write, checkpoints)
                    self._measure(pieces, write, checkpoints)
                    number = stopping.signal(signals.number)
                    if number is not None:
                        self.clock.stop()
                        stopping.answer()
                        self._save(records, checkpoints)
                        raise Interrupted(number, self.step)
                self.clock.stop()
                self._end_epoch(epoch, records, write, checkpoints)
            stopping.answer()
        reached = self._reached
        return Summary(
            accuracy=self._last["accuracy"],
            accuracy_recalibrated=self._last["accuracy_recalibrated"],
            loss=self._last["loss"],
            train_loss=self._last["train_loss"],
            steps=self.step,
            seconds=self.clock.training,
            compile_seconds=self.clock.compiling,
            steps_to_target=reached,
            epochs_to_target=None if reached is None else reached / self.steps_per_epoch,
        )

    def _take_step(self, pieces: Pieces) -> None:
        change = self._factor(self.step)
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * change
        loss = self._gradients(pieces)
        self.optimizer.step()
        self.step += 1
        self._losses.add(loss, self.step)

    def _factor(self, step: int) -> float:
        return factor(
            self.config.sched,
            step,
            total_steps=self.total_steps,
            ramp_steps=round(self.config.ramp_epochs * self.steps_per_epoch),
            steps_per_epoch=self.steps_per_epoch,
        )

    # ------------------------------------------------------------------ what is written

    def _written(
        self, records: Records, observe: Observer
    ) -> contextlib.AbstractContextManager[Observer]:
        """What takes a line to everyone who wants it, in the leading process."""
        if not self.process.leads:
            return contextlib.nullcontext(lambda line: None)
        return written(records, observe, self.step if self.config.tensorboard else None)

    def _log(self, write: Observer, checkpoints: Checkpoints) -> None:
        """A line for the steps since the last one."""
        self._check_finite(checkpoints)
        loss = self._losses.recent()
        if loss is None:
            return
        line: dict[str, Any] = {
            "kind": "step",
            "step": self.step,
            "epoch": self.step / self.steps_per_epoch,
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "train_loss": loss,
        }
        if isinstance(self.optimizer, Neumann):
            line["optimizer"] = self.optimizer.diagnostics().as_dict()
        write(line)

    def _measure(self, pieces: Pieces, write: Observer, checkpoints: Checkpoints) -> None:
        """A line about the curvature where one is due, outside the training clock."""
        if not self._curvature.due(self.step, self.total_steps):
            return
        self.clock.stop(compiled=not self._gradients.prepared)
        self._check_finite(checkpoints)  # a run that diverged is to end as such
        line: dict[str, Any] = {
            "kind": "spectrum",
            "step": self.step,
            "epoch": self.step / self.steps_per_epoch,
            "lr": self._peaks[0] * self._factor(max(self.step - 1, 0)),
        }
        led(self.process, lambda: write(line | self._curvature.measured(pieces[0])))
        self.clock.start()

    def _end_epoch(
        self, epoch: int, records: Records, write: Observer, checkpoints: Checkpoints
    ) -> None:
        self._log(write, checkpoints)
        average_statistics(self.model, self.process)
        done = epoch + 1
        line: dict[str, Any] = {
            "kind": "epoch",
            "step": self.step,
            "epoch": done,
            "train_loss": self._losses.epoch(),
            "seconds": self.clock.training,
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
        write(line)
        if not math.isfinite(line.get("loss", 0.0)):  # the last step was one too far
            raise self._diverged(self.step, checkpoints)
        self._last = {**self._last, **line}
        every = self.config.checkpoint_every
        if done == self.config.epochs or (every and done % every == 0):
            self._save(records, checkpoints)

    def _evaluate(self) -> tuple[Score, Score | None]:
        """At the evaluation weights, with the running statistics and with recalibrated ones."""
        batch = min(max(self.config.batch_size, 512), 4096)  # a larger one gains no time
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
                average_statistics(self.model, self.process)
                return score, evaluate(self.model, *arguments)

    # ------------------------------------------------------------------ stopping and going on

    def _save(self, records: Records, checkpoints: Checkpoints) -> None:
        self._check_finite(checkpoints)
        own = {
            "rng": rng_state(),
            "losses": self._losses.state(),
            "statistics": [buffer.cpu() for buffer in statistics(self.model)],
        }
        payload = {
            **self.network.state(self.optimizer),
            "processes": gathered(own, self.process),
            "seconds": self.clock.training,
            "compile_seconds": self.clock.compiling,
            "reached": self._reached,
            "last": self._last,
        }

        def write() -> None:
            records.sync()  # a checkpoint must not know more than the lines
            checkpoints.save(self.step, payload)

        led(self.process, write)

    def _resume(self, records: Records, checkpoints: Checkpoints) -> None:
        found = checkpoints.latest()
        if found is not None:
            payload = found.payload
            ranks = len(payload["processes"])
            if ranks != self.process.ranks:
                raise UsageError(
                    f"the run in {records.folder} has {ranks} processes; "
                    f"it cannot go on with {self.process.ranks}"
                )
            own = payload["processes"][self.process.rank]
            self.network.load(self.optimizer, payload)
            restore_statistics(self.model, own["statistics"])
            restore_rng(own["rng"])
            self._losses.load(own["losses"])
            self.clock.training = payload["seconds"]
            self.clock.compiling = payload["compile_seconds"]
            self._reached, self._last = payload["reached"], payload["last"]
            self.step = found.step
            for path in found.damaged if self.process.leads else ():
                print(f"neumann: {path} is damaged; going on from {found.path}", file=sys.stderr)
        # Without a checkpoint the line of step 0 will be written again, too.
        step = -1 if found is None else self.step
        led(self.process, lambda: records.rewind(step))

    def _check_finite(self, checkpoints: Checkpoints) -> None:
        bad = self._losses.first_bad()
        if bad is not None:
            raise self._diverged(bad, checkpoints)

    def _diverged(self, step: int, checkpoints: Checkpoints) -> Diverged:
        found = checkpoints.latest()
        lr = self._peaks[0] * self._factor(step - 1)
        return Diverged(step, lr, None if found is None else str(found.path))

    # ------------------------------------------------------------------ small things

    def _passes(self) -> Gradients | CapturedGradients:
        config = self.config
        gradients = Gradients(
            self.network.trained,
            self.optimizer,
            lambda outputs, labels: classification_loss(outputs, labels, config.smoothing),
            self._autocast,
            compiled=config.compile == "on",
        )
        return CapturedGradients(gradients) if config.cuda_graph == "on" else gradients

    def _plan(self, epoch: int, first: int = 0) -> Plan:
        config, process = self.config, self.process
        share = max(config.batch_size // process.ranks, 1)
        most = min(config.micro_batch_size or share, share)
        return Plan(
            config.batch_size,
            micro_batches=next(n for n in range(-(-share // most), share + 1) if share % n == 0),
            seed=config.seed,
            epoch=epoch,
            first=first,
            rank=process.rank,
            ranks=process.ranks,
        )

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        # A captured graph must not find a cast weight in the cache of the pass before.
        return torch.autocast(
            self.device.type,
            torch.bfloat16,
            enabled=self.config.amp == "bf16",
            cache_enabled=self.device.type != "cuda",
        )
