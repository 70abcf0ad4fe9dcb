"""What a run trains: data, model and optimizer, from a resolved config; and how it takes a step.

The data, augmentation and learning rate of a step depend only on the step's number and the config.
The state of a learner is everything else that its next steps depend on: weights, optimizer and
random generators.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from neumann.lab.config import TrainConfig
from neumann.lab.data import Dataset
from neumann.lab.data.plan import derive_seed
from neumann.lab.lr_schedules import Schedule
from neumann.lab.models import build as build_model
from neumann.lab.models import check_model, classification_loss
from neumann.lab.optimizers.arms import Arm, build_optimizer, evaluation_mode
from neumann.lab.training.batchnorm_layers import get_statistics, set_statistics
from neumann.lab.training.checkpoints import LoadedCheckpoint
from neumann.lab.training.evaluation import Score, evaluate_twice
from neumann.lab.training.gradients import CapturedGradientComputer, GradientComputer, Pieces
from neumann.lab.training.inner_loops import InnerLoop
from neumann.lab.training.inputs import open_dataset, plan_epoch
from neumann.lab.training.network import wrap_model
from neumann.lab.training.processes import Process
from neumann.lab.training.random_state import get_rng_state, set_rng_state
from neumann.lab.training.resuming import check_optimizer, explain_misfit
from neumann.lab.training.weight_average import WeightAverage


class Learner:
    """The model, its data and its optimizer, ready for the first step."""

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
        self.gradients = CapturedGradientComputer(computer) if captured else computer
        self._inner_loop: InnerLoop | None = None
        if InnerLoop.suits(self.optimizer):
            parts = (self.optimizer, self.gradients, self.model, loss, self._autocast)
            self._inner_loop = InnerLoop(*parts)
        self._peak_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.step = 0  # completed steps
        if process.ranks > 1:  # dropout must differ between processes
            torch.manual_seed(derive_seed("process", config.seed, process.rank))

    def take_step(self, pieces: Pieces) -> Tensor:
        """Take the next step and return the loss at its start, on the device."""
        factor = self._lr_factor(self.step)
        for group, peak in zip(self.optimizer.param_groups, self._peak_lrs, strict=True):
            group["lr"] = peak * factor
        if self._inner_loop is not None:
            loss = self._inner_loop.take_step(pieces)
        else:
            loss = self.gradients.compute(pieces)
            self.optimizer.step()
        self.step += 1
        if self.average is not None:
            self.average.update(self.step)
        return loss

    def get_lr(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        peak: float = self._peak_lrs[0]
        return peak * self._lr_factor(step - 1)

    @property
    def counts(self) -> dict[str, int]:
        """What an inner loop has evaluated so far; {} for optimizers without one."""
        return {} if self._inner_loop is None else self._inner_loop.counts

    # ------------------------------------------------------------------ evaluation

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

    # ------------------------------------------------------------------ state

    def get_state(self) -> dict[str, Any]:
        """Return what a checkpoint holds once for all processes; all of them must call this."""
        average = {} if self.average is None else {"average": self.average.get_state()}
        return {
            **self.network.get_state(self.optimizer),
            **average,
            "counts": dict(self.counts),
        }

    def get_own_state(self) -> dict[str, Any]:
        """Return what a checkpoint holds for each process."""
        own = {
            "rng": get_rng_state(),
            "statistics": [buffer.cpu() for buffer in get_statistics(self.model)],
        }
        if self.average is not None:
            own["average_statistics"] = self.average.get_statistics()
        return own

    def load(self, found: LoadedCheckpoint) -> None:
        """Continue from a checkpoint; one whose state does not fit is a CheckpointError."""
        payload = found.payload
        own = payload["processes"][self.process.rank]
        with explain_misfit(found):
            if not self.network.sharded:  # there the state is keyed by name
                check_optimizer(found, self.optimizer)
            self.network.load_state(self.optimizer, payload)
            set_statistics(self.model, own["statistics"])
            if self.average is not None:
                self.average.load(payload["average"], own["average_statistics"])
            set_rng_state(own["rng"])
        self.counts.update(payload.get("counts") or {})
        self.step = found.step
