"""`neumann train`: train one network, alone or as one of torchrun's processes."""

import dataclasses
import sys

from neumann.lab.commands.progress import show_training
from neumann.lab.config import TrainConfig
from neumann.lab.storage.folders import new_run_folder
from neumann.lab.storage.reading import CONFIG
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process, count_processes, gather_objects, join_processes
from neumann.lab.training.records import check_same_config
from neumann.optim import Neumann
from neumann.optim.long_warmup import describe_long_warmup


def run(config: TrainConfig) -> None:
    config = config.resolve(count_processes())
    with join_processes() as process:
        _train(config, process)


def _train(config: TrainConfig, process: Process) -> None:
    """A separate function, so that the training is freed before the process group ends."""
    if config.output is not None and (config.output / CONFIG).exists():
        check_same_config(config.output, config.as_record())  # before the data is loaded
    training = Training(config, process)
    learner = training.learner
    if process.is_leader and isinstance(learner.optimizer, Neumann):
        warning = describe_long_warmup(learner.optimizer, learner.total_steps)
        if warning:
            print(f"neumann: {warning}", file=sys.stderr)
    # All processes write to the folder that the first one chose.
    folder = gather_objects(config.output or new_run_folder(config.title), process)[0]
    with show_training(learner) as observe:
        summary = training.run(folder, observe)
    if process.is_leader:
        time = f"{summary.seconds:.1f} s of training"
        if summary.compile_seconds:
            time += f" and {summary.compile_seconds:.1f} s of compilation"
        score = config.metric.describe(dataclasses.asdict(summary))
        print(f"{score} after {summary.steps} steps, {time}: {folder}")
        if config.target is not None:
            reached = summary.steps_to_target
            when = "was not reached" if reached is None else f"was reached after {reached} steps"
            print(f"the target of {config.metric.format_target(config.target)} {when}")
