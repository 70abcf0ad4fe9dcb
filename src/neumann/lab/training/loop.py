"""One training run: from a resolved config to a folder of records.

The data, augmentation and learning rate of a step depend only on the step's number and the config.
A checkpoint holds everything else: weights, optimizer, random generators, and the losses since the
last line. So on a CPU, a run resumed from any checkpoint writes the same bits as one that was never
interrupted.

Kinds of lines in the metrics: "timetable" (once, at step 0, for Neumann), "step", "epoch" and
"spectrum".
"""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from neumann.lab.config import TrainConfig
from neumann.lab.data import Dataset
from neumann.lab.data.plan import derive_seed
from neumann.lab.errors import UsageError
from neumann.lab.lr_schedules import Schedule
from neumann.lab.metrics import choose_metric
from neumann.lab.models import build as build_model
from neumann.lab.models import check_model, classification_loss
from neumann.lab.optimizers.arms import Arm, build_optimizer, evaluation_mode
from neumann.lab.storage import strict_json
from neumann.lab.storage.reading import METRICS
from neumann.lab.storage.run_files import (
    Divergence,
    RunFiles,
    Summary,
    check_lines,
    read_run_files,
)
from neumann.lab.training.batchnorm_layers import average_statistics, get_statistics, set_statistics
from neumann.lab.training.checkpoints import Checkpoints
from neumann.lab.training.clock import TrainingClock
from neumann.lab.training.curvature import Curvature
from neumann.lab.training.evaluation import Score, evaluate_twice
from neumann.lab.training.gradients import CapturedGradientComputer, GradientComputer, Pieces
from neumann.lab.training.inner_loops import InnerLoop
from neumann.lab.training.inputs import open_dataset, plan_epoch
from neumann.lab.training.lines import (
    Line,
    Observer,
    describe_timetable,
    measure_gradient,
    open_writer,
)
from neumann.lab.training.network import wrap_model
from neumann.lab.training.processes import Process, StopAgreement, gather_objects, run_on_leader
from neumann.lab.training.random_state import get_rng_state, set_rng_state
from neumann.lab.training.records import CHECKPOINTS, Diverged, Records
from neumann.lab.training.resuming import (
    check_checkpoint,
    check_last_epoch,
    check_optimizer,
    explain_misfit,
)
from neumann.lab.training.running_loss import RunningLoss
from neumann.lab.training.signals import Interrupted, ReceivedSignal, catch_signals
from neumann.lab.training.weight_average import WeightAverage
from neumann.optim import Neumann


class Training:
    """A run that is ready to start. Build it, then call `run` once."""

    def __init__(self, config: TrainConfig, process: Process, dataset: Dataset | None = None):
        self.config = config
        self.process = process
        self.device = process.device(config.device)
        check_model(config.model, config.data)
        self.dataset = dataset or open_dataset(config, process)
        plan = plan_epoch(config, process, 0)
        self.steps_per_epoch = plan.count_batches(len(self.dataset.train))
        self.total_steps = config.epochs * self.steps_per_epoch
        ramp = config.count_ramp_steps(self.total_steps, self.steps_per_epoch)
        schedule = Schedule.parse(config.sched)
        self._lr_factor = schedule.bind(self.total_steps, ramp, self.steps_per_epoch)
        torch.manual_seed(config.seed)
        model = build_model(config.model, self.dataset).to(self.device)
        if config.channels_last == "on" and self.dataset.kind == "image":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        at_once = config.batch_size // process.ranks // plan.micro_batches
        self.network = wrap_model(model, config, process, at_once)
        self.model = self.network.model
        self.optimizer = build_optimizer(
            Arm.parse(config.opt).on(config.data),
            self.model,
            lr=config.lr,
            weight_decay=config.weight_decay,
            steps_per_epoch=self.steps_per_epoch,
            steps=self.total_steps,
        )
        self.average: WeightAverage | None = None
        if config.ema is not None:
            self.average = WeightAverage(self.model, self.optimizer, config.ema)
        # No cache on a GPU: a captured graph must not reuse a weight cast in an earlier pass.
        options = {"enabled": config.amp == "bf16", "cache_enabled": self.device.type != "cuda"}
        self._autocast = partial(torch.autocast, self.device.type, torch.bfloat16, **options)
        loss = partial(classification_loss, smoothing=config.smoothing)
        computer = GradientComputer(
            self.network.wrapped,
            self.optimizer,
            loss,
            self._autocast,
            config.compile == "on",
            config.clip_grad,
        )
        captured = config.cuda_graph == "on"
        self._gradients = CapturedGradientComputer(computer) if captured else computer
        self._inner_loop: InnerLoop | None = None
        if InnerLoop.suits(self.optimizer):
            parts = (self.optimizer, self._gradients, self.model, loss, self._autocast)
            self._inner_loop = InnerLoop(*parts)
        self._curvature = Curvature(config, self.dataset, self.model, self.optimizer)
        self._peak_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.step = 0  # completed steps
        self.clock = TrainingClock(self.device)
        self._target_step: int | None = None  # the first step that reached the target
        self._losses = RunningLoss(self.device, process)
        self._last_epoch: Line = {}
        self._write: Observer = lambda line: None  # the leader sets it during a run
        self._received = ReceivedSignal()
        if process.ranks > 1:  # dropout must differ between processes
            torch.manual_seed(derive_seed("process", config.seed, process.rank))

    # ------------------------------------------------------------------ the run

    def run(self, folder: Path, observe: Observer = lambda line: None) -> Summary:
        """Train to the end. The leader calls `observe` with every line except the timetable.

        Raises Interrupted after a signal, once everything is saved; Diverged if the loss was not
        finite; UsageError if the folder holds another run, or holds this one without --resume auto.
        """
        settings = self.config.as_record()
        self._settings = strict_json.encode(settings)
        self._checkpoints = Checkpoints(folder / CHECKPOINTS)
        with Records(folder) as self._records:
            self._on_leader(lambda: self._records.begin(settings, self.dataset.data_hash))
            files = read_run_files(folder)
            used = files.summary is not None or files.lines or self._checkpoints.list_steps()
            if used and self.config.resume != "auto":
                raise UsageError(
                    f"{folder} holds a run already: --resume auto continues it, another --output "
                    "starts a new one"
                )
            if isinstance(files.result, Divergence):
                raise Diverged(**dataclasses.asdict(files.result))
            if files.result is not None:
                return files.result
            self._metric = choose_metric(files.config)  # of the folder, which may be an older one
            self._resume(files)
            return self._train_and_record(observe)

    @property
    def late_signal(self) -> int | None:
        """A signal that arrived after the last step, when the run was ending anyway."""
        return self._received.number

    def _train_and_record(self, observe: Observer) -> Summary:
        """Train, and write all lines and the summary, also that of a run that diverges."""
        try:
            with contextlib.ExitStack() as stack:
                if self.process.is_leader:
                    first = self.step if self.config.tensorboard else None
                    self._write = stack.enter_context(open_writer(self._records, observe, first))
                summary = self._train()
        except Diverged as error:
            failure = {"step": error.step, "lr": error.lr, "checkpoint": error.checkpoint}
            self._on_leader(lambda: self._records.finish({"diverged": failure}))
            raise
        finally:
            self._gradients.release()
        self._on_leader(lambda: self._records.finish(summary.as_record()))
        return summary

    def _train(self) -> Summary:
        agreement = StopAgreement(self.process)
        compiling = not self._gradients.prepared
        with catch_signals(repeatedly=self.process.ranks > 1) as self._received:
            timetable = describe_timetable(self.optimizer, self.total_steps)
            if self.step == 0 and timetable is not None:
                self._on_leader(lambda: self._records.append(**timetable))
            while self.step < self.total_steps:
                epoch, first = divmod(self.step, self.steps_per_epoch)
                self.clock.start()
                plan = plan_epoch(self.config, self.process, epoch, first)
                for pieces in self.dataset.train.batches(plan):
                    if self.step == 0:
                        self._measure_curvature(pieces)
                    self._take_step(pieces)
                    if compiling and self._gradients.prepared:
                        compiling = False
                        self.clock.end_lap(compiling=True)
                    if self.step % self.config.log_every == 0:
                        self._log()
                    self._measure_curvature(pieces)
                    number = agreement.exchange(self._received.number)
                    if number is not None:
                        self.clock.end_lap()
                        if self.step % self.steps_per_epoch == 0:
                            # A resumed run starts with the next epoch, so this one ends here.
                            self._end_epoch(epoch + 1)
                        agreement.finish()
                        self._save()
                        progress = f"after step {self.step}; --resume auto continues from there"
                        raise Interrupted(number, progress)
                self.clock.end_lap()
                self._end_epoch(epoch + 1)
            agreement.finish()
        reached, last = self._target_step, self._last_epoch
        return Summary(
            accuracy=last["accuracy"],
            accuracy_recalibrated=last["accuracy_recalibrated"],
            perplexity=last.get("perplexity"),
            bits_per_byte=last.get("bits_per_byte"),
            top5=last.get("top5"),
            loss=last["loss"],
            train_loss=last["train_loss"],
            steps=self.step,
            seconds=self.clock.training,
            compile_seconds=self.clock.compiling,
            steps_to_target=reached,
            epochs_to_target=None if reached is None else reached / self.steps_per_epoch,
            **self._counts,
        )

    def _take_step(self, pieces: Pieces) -> None:
        factor = self._lr_factor(self.step)
        for group, peak in zip(self.optimizer.param_groups, self._peak_lrs, strict=True):
            group["lr"] = peak * factor
        if self._inner_loop is not None:
            loss = self._inner_loop.take_step(pieces)
        else:
            loss = self._gradients.compute(pieces)
            self.optimizer.step()
        self.step += 1
        if self.average is not None:
            self.average.update(self.step)
        self._losses.add(loss, self.step)

    @property
    def _counts(self) -> dict[str, int]:
        """What an inner loop has evaluated so far; {} for optimizers without one."""
        return {} if self._inner_loop is None else self._inner_loop.counts

    # ------------------------------------------------------------------ lines of the metrics

    def _log(self) -> None:
        """Write a line about the steps since the last one."""
        self._check_finite()
        loss = self._losses.take_recent_mean()
        if loss is None:
            return
        line = self._start_line("step", float(self.optimizer.param_groups[0]["lr"]))
        line["train_loss"] = loss
        if isinstance(self.optimizer, Neumann):
            line["optimizer"] = self.optimizer.diagnostics().as_dict()
            line["gradient_norm"] = measure_gradient(self.optimizer)
        self._write(line | self._counts)

    def _measure_curvature(self, pieces: Pieces) -> None:
        """Write a line about the curvature if one is due. Its time does not count as training."""
        if not self._curvature.is_due(self.step, self.total_steps):
            return
        self.clock.end_lap(compiling=not self._gradients.prepared)
        self._check_finite()
        line = self._start_line("spectrum", self._lr_of(max(self.step, 1)))
        self._on_leader(lambda: self._write(line | self._curvature.measure(pieces[0])))
        self.clock.start()

    def _start_line(self, kind: str, lr: float) -> Line:
        epoch = self.step / self.steps_per_epoch
        return {"kind": kind, "step": self.step, "epoch": epoch, "lr": lr}

    def _end_epoch(self, done: int) -> None:
        self._log()
        average_statistics(self.model, self.process)
        line: Line = {
            "kind": "epoch",
            "step": self.step,
            "epoch": done,
            "train_loss": self._losses.take_epoch_mean(),
            "seconds": self.clock.training,
            **self._counts,
        }
        if done % self.config.eval_every == 0 or done == self.config.epochs:
            score, recalibrated = self.evaluate()
            line |= {
                **score.as_fields(),
                "accuracy_recalibrated": None if recalibrated is None else recalibrated.accuracy,
            }
            metric, target = self._metric, self.config.target
            if target is not None and self._target_step is None:
                reached = metric.is_reached(line[metric.key], target)
                self._target_step = self.step if reached else None
        self._write(line)
        if not math.isfinite(line.get("loss", 0.0)):  # the last step overshot
            raise self._make_diverged(self.step)
        self._last_epoch |= line
        every = self.config.checkpoint_every
        if done == self.config.epochs or (every and done % every == 0):
            self._save()

    def evaluate(self) -> tuple[Score, Score | None]:
        """Score the evaluation weights with running and with recalibrated BatchNorm statistics."""
        with self.evaluation_weights():
            return evaluate_twice(
                self.model, self.dataset, self.config, self.process, self._autocast
            )

    @contextlib.contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Let the model hold the weights to evaluate: the optimizer's, or with --ema the average.

        Neumann takes writes to its parameters for a mistake, except in its evaluation mode.
        """
        with evaluation_mode(self.optimizer):
            if self.average is None:
                yield
                return
            with self.average.in_place_of_weights(self.process):
                yield

    # ------------------------------------------------------------------ saving and resuming

    def _save(self) -> None:
        self._check_finite()
        own = {
            "rng": get_rng_state(),
            "losses": self._losses.state_dict(),
            "statistics": [buffer.cpu() for buffer in get_statistics(self.model)],
        }
        average = {}
        if self.average is not None:
            average = {"average": self.average.get_state()}
            own["average_statistics"] = self.average.get_statistics()
        payload = {
            **self.network.get_state(self.optimizer),
            **average,
            "processes": gather_objects(own, self.process),
            "seconds": self.clock.training,
            "compile_seconds": self.clock.compiling,
            "reached": self._target_step,
            "last": self._last_epoch,
            "config": self._settings,
            "counts": dict(self._counts),
        }

        def write() -> None:
            # The lines must be on disk before the checkpoint that counts on them.
            self._records.sync()
            self._checkpoints.save(self.step, payload)

        self._on_leader(write)

    def _resume(self, files: RunFiles) -> None:
        found = self._checkpoints.load_latest()
        if found is not None:
            payload = found.payload
            check_checkpoint(found, self._settings)
            ranks = len(payload["processes"])
            if ranks != self.process.ranks:
                raise UsageError(
                    f"the run in {self._records.folder} has {ranks} processes; "
                    f"it cannot continue with {self.process.ranks}"
                )
            metrics = self._records.folder / METRICS
            check_lines(files.lines, self._settings, found.step, self.steps_per_epoch, metrics)
            check_last_epoch(found, files.lines, self.steps_per_epoch, self.total_steps)
            own = payload["processes"][self.process.rank]
            with explain_misfit(found):
                if not self.network.sharded:  # there the state is keyed by name
                    check_optimizer(found, self.optimizer)
                self.network.load_state(self.optimizer, payload)
                set_statistics(self.model, own["statistics"])
                if self.average is not None:
                    self.average.load(payload["average"], own["average_statistics"])
                set_rng_state(own["rng"])
                self._losses.load_state_dict(own["losses"])
            self.clock.training = payload["seconds"]
            self.clock.compiling = payload["compile_seconds"]
            self._target_step, self._last_epoch = payload["reached"], payload["last"]
            self._counts.update(payload.get("counts") or {})
            self.step = found.step
            for path in found.damaged if self.process.is_leader else ():
                print(f"neumann: {path} is damaged; using {found.path}", file=sys.stderr)
        # Without a checkpoint the lines of step 0 are written again, too.
        step = -1 if found is None else self.step
        self._on_leader(lambda: self._records.rewind(step))

    def _check_finite(self) -> None:
        step = self._losses.find_first_bad()
        if step is not None:
            raise self._make_diverged(step)

    def _make_diverged(self, step: int) -> Diverged:
        found = self._checkpoints.load_latest()
        return Diverged(step, self._lr_of(step), None if found is None else str(found.path))

    def _lr_of(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        peak: float = self._peak_lrs[0]
        return peak * self._lr_factor(step - 1)

    def _on_leader(self, action: Callable[[], object]) -> None:
        run_on_leader(self.process, action)
