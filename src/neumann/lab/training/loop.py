"""One training run: from a resolved config to a folder of records.

What is trained, and how it takes a step, is in `learner`. A checkpoint holds its state and the
losses since the last line. So on a CPU, a run resumed from any checkpoint writes the same bits as
one that was never interrupted.

Kinds of lines in the metrics: "timetable" (once, at step 0, for Neumann), "step", "epoch",
"evaluation" (inside an epoch) and "spectrum".
"""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path

from neumann.lab.config import TrainConfig
from neumann.lab.data import Dataset
from neumann.lab.errors import UsageError
from neumann.lab.metrics import choose_metric
from neumann.lab.storage import strict_json
from neumann.lab.storage.reading import METRICS
from neumann.lab.storage.run_files import (
    Divergence,
    RunFiles,
    Summary,
    check_lines,
    read_run_files,
)
from neumann.lab.training.batchnorm_layers import average_statistics, keep_statistics
from neumann.lab.training.checkpoints import Checkpoints
from neumann.lab.training.clock import TrainingClock
from neumann.lab.training.curvature import Curvature
from neumann.lab.training.gradients import Pieces
from neumann.lab.training.inputs import plan_epoch
from neumann.lab.training.learner import Learner
from neumann.lab.training.lines import (
    Line,
    Observer,
    describe_timetable,
    measure_gradient,
    open_writer,
)
from neumann.lab.training.processes import Process, StopAgreement, gather_objects, run_on_leader
from neumann.lab.training.records import CHECKPOINTS, Diverged, Records
from neumann.lab.training.resuming import check_checkpoint, check_last_epoch, explain_misfit
from neumann.lab.training.running_loss import RunningLoss
from neumann.lab.training.signals import Interrupted, ReceivedSignal, catch_signals
from neumann.optim import Neumann


class Training:
    """A run that is ready to start. Build it, then call `run` once."""

    def __init__(self, config: TrainConfig, process: Process, dataset: Dataset | None = None):
        self.config = config
        self.process = process
        self.learner = learner = Learner(config, process, dataset)
        self.clock = TrainingClock(learner.device)
        self._curvature = Curvature(config, learner.dataset, learner.model, learner.optimizer)
        self._losses = RunningLoss(learner.device, process)
        self._target_step: int | None = None  # the first step that reached the target
        self._last_epoch: Line = {}
        self._write: Observer = lambda line: None  # the leader sets it during a run
        self._received = ReceivedSignal()

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
            self._on_leader(lambda: self._records.begin(settings, self.learner.dataset.data_hash))
            files = read_run_files(folder)
            used = files.summary is not None or files.lines or self._checkpoints.list_steps()
            if used and self.config.resume != "auto":
                raise UsageError(
                    f"{folder} already holds a run: add --resume auto to continue it, or choose "
                    "another --output"
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
                    first = self.learner.step if self.config.tensorboard else None
                    self._write = stack.enter_context(open_writer(self._records, observe, first))
                summary = self._train()
        except Diverged as error:
            failure = {"step": error.step, "lr": error.lr, "checkpoint": error.checkpoint}
            self._on_leader(lambda: self._records.finish({"diverged": failure}))
            raise
        finally:
            self.learner.gradients.release()
        self._on_leader(lambda: self._records.finish(summary.as_record()))
        return summary

    def _train(self) -> Summary:
        learner = self.learner
        agreement = StopAgreement(self.process)
        compiling = not learner.gradients.prepared
        with catch_signals(repeatedly=self.process.ranks > 1) as self._received:
            timetable = describe_timetable(learner.optimizer, learner.total_steps)
            if learner.step == 0 and timetable is not None:
                self._on_leader(lambda: self._records.append(**timetable))
            while learner.step < learner.total_steps:
                epoch, first = divmod(learner.step, learner.steps_per_epoch)
                self.clock.start()
                plan = plan_epoch(self.config, self.process, epoch, first)
                for pieces in learner.dataset.train.batches(plan):
                    if learner.step == 0:
                        self._measure_curvature(pieces)
                    loss = learner.take_step(pieces)
                    self._losses.add(loss, learner.step)
                    if compiling and learner.gradients.prepared:
                        compiling = False
                        self.clock.end_lap(compiling=True)
                    if learner.step % self.config.log_every == 0:
                        self._log()
                    self._measure_curvature(pieces)
                    if learner.step % learner.steps_per_epoch:
                        self._pause_inside_epoch()
                    number = agreement.exchange(self._received.number)
                    if number is not None:
                        self.clock.end_lap()
                        if learner.step % learner.steps_per_epoch == 0:
                            # A resumed run starts with the next epoch, so this one ends here.
                            self._end_epoch(epoch + 1)
                        agreement.finish()
                        self._save()
                        progress = f"after step {learner.step}; --resume auto continues from there"
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
            steps=learner.step,
            seconds=self.clock.training,
            compile_seconds=self.clock.compiling,
            steps_to_target=reached,
            epochs_to_target=None if reached is None else reached / learner.steps_per_epoch,
            **learner.counts,
        )

    # ------------------------------------------------------------------ lines of the metrics

    def _log(self) -> None:
        """Write a line about the steps since the last one."""
        self._check_finite()
        loss = self._losses.take_recent_mean()
        if loss is None:
            return
        learner = self.learner
        line = self._start_line("step", float(learner.optimizer.param_groups[0]["lr"]))
        line["train_loss"] = loss
        if isinstance(learner.optimizer, Neumann):
            line["optimizer"] = learner.optimizer.diagnostics().as_dict()
            line["gradient_norm"] = measure_gradient(learner.optimizer)
        self._write(line | learner.counts)

    def _measure_curvature(self, pieces: Pieces) -> None:
        """Write a line about the curvature if one is due. Its time does not count as training."""
        learner = self.learner
        if not self._curvature.is_due(learner.step, learner.total_steps):
            return
        self.clock.end_lap(compiling=not learner.gradients.prepared)
        self._check_finite()
        line = self._start_line("spectrum", learner.get_lr(max(learner.step, 1)))
        self._on_leader(lambda: self._write(line | self._curvature.measure(pieces[0])))
        self.clock.start()

    def _start_line(self, kind: str, lr: float) -> Line:
        step = self.learner.step
        return {"kind": kind, "step": step, "epoch": step / self.learner.steps_per_epoch, "lr": lr}

    def _end_epoch(self, done: int) -> None:
        learner = self.learner
        self._log()
        average_statistics(learner.model, self.process)
        line: Line = {
            "kind": "epoch",
            "step": learner.step,
            "epoch": done,
            "train_loss": self._losses.take_epoch_mean(),
            "seconds": self.clock.training,
            **learner.counts,
        }
        if done % self.config.eval_every == 0 or done == self.config.epochs:
            line |= self._evaluate()
        self._write(line)
        if not math.isfinite(line.get("loss", 0.0)):  # the last step overshot
            raise self._make_diverged(learner.step)
        self._last_epoch |= line
        every = self.config.checkpoint_every
        if done == self.config.epochs or (every and done % every == 0):
            self._save()

    def _pause_inside_epoch(self) -> None:
        """Evaluate and save if that is due. Their time does not count as training."""
        step, periods = self.learner.step, (self.config.eval_steps, self.config.checkpoint_steps)
        evaluates, saves = (period > 0 and step % period == 0 for period in periods)
        if not evaluates and not saves:
            return
        self.clock.end_lap(compiling=not self.learner.gradients.prepared)
        if evaluates:
            self._check_finite()
            place = {"step": step, "epoch": step / self.learner.steps_per_epoch}
            line: Line = {"kind": "evaluation", **place, "seconds": self.clock.training}
            # The statistics of this process go on as they are, so that evaluating changes nothing.
            with keep_statistics(self.learner.model):
                average_statistics(self.learner.model, self.process)
                line |= self._evaluate()
            self._write(line)  # early statistics of BatchNorm may overflow in a run that recovers
        if saves:
            self._save()
        self.clock.start()

    def _evaluate(self) -> Line:
        """Score the weights, and note whether the target is reached for the first time."""
        score, recalibrated = self.learner.evaluate()
        scores: Line = {
            **score.as_fields(),
            "accuracy_recalibrated": None if recalibrated is None else recalibrated.accuracy,
        }
        metric, target = self._metric, self.config.target
        if target is not None and self._target_step is None:
            reached = metric.is_reached(scores[metric.key], target)
            self._target_step = self.learner.step if reached else None
        return scores

    # ------------------------------------------------------------------ saving and resuming

    def _save(self) -> None:
        self._check_finite()
        own = {**self.learner.get_own_state(), "losses": self._losses.state_dict()}
        payload = {
            **self.learner.get_state(),
            "processes": gather_objects(own, self.process),
            "seconds": self.clock.training,
            "compile_seconds": self.clock.compiling,
            "reached": self._target_step,
            "last": self._last_epoch,
            "config": self._settings,
        }

        def write() -> None:
            # The lines must be on disk before the checkpoint that counts on them.
            self._records.sync()
            self._checkpoints.save(self.learner.step, payload)

        self._on_leader(write)

    def _resume(self, files: RunFiles) -> None:
        learner = self.learner
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
            check_lines(files.lines, self._settings, found.step, learner.steps_per_epoch, metrics)
            check_last_epoch(found, files.lines, learner.steps_per_epoch, learner.total_steps)
            learner.load(found)
            own = payload["processes"][self.process.rank]
            with explain_misfit(found):
                self._losses.load_state_dict(own["losses"])
            self.clock.training = payload["seconds"]
            self.clock.compiling = payload["compile_seconds"]
            self._target_step, self._last_epoch = payload["reached"], payload["last"]
            for path in found.damaged if self.process.is_leader else ():
                print(f"neumann: {path} is damaged; using {found.path}", file=sys.stderr)
        # Without a checkpoint the lines of step 0 are written again, too.
        step = -1 if found is None else learner.step
        self._on_leader(lambda: self._records.rewind(step))

    def _check_finite(self) -> None:
        step = self._losses.find_first_bad()
        if step is not None:
            raise self._make_diverged(step)

    def _make_diverged(self, step: int) -> Diverged:
        found = self._checkpoints.load_latest()
        return Diverged(step, self.learner.get_lr(step), None if found is None else str(found.path))

    def _on_leader(self, action: Callable[[], object]) -> None:
        run_on_leader(self.process, action)
