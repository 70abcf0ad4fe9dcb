"""The data of a run: loading its data set, and planning the batches of an epoch."""

import math
from typing import Any

from neumann.lab.config import TrainConfig
from neumann.lab.data import Dataset, Plan, load
from neumann.lab.errors import UsageError
from neumann.lab.training.processes import Process, run_on_leader


def open_dataset(config: TrainConfig, process: Process | None = None) -> Dataset:
    """Load the data set onto the process's device.

    With `held_out`, the validation set takes the place of the test set, or a tenth of the training
    set where there is none.
    """
    process = process or Process()
    settings = get_data_settings(config, process)
    held_out = settings.pop("held_out")

    def load_dataset() -> Dataset:
        return load(**settings)

    if config.download or (process.ranks > 1 and config.tokens.startswith("bpe")):
        run_on_leader(process, load_dataset)  # so that only one process downloads or tokenizes
    dataset = load_dataset()
    _check_target(config, dataset)
    return dataset.hold_out() if held_out else dataset


def get_data_settings(config: TrainConfig, process: Process) -> dict[str, Any]:
    """Return everything that a data set depends on: what `load` takes, and `held_out`."""
    return {
        "name": config.data,
        "data_dir": config.data_dir,
        "download": config.download,
        "device": process.device(config.device),
        "flip": config.flip,
        "shift": config.shift,
        "cutout": config.cutout,
        "context": config.context,
        "tokens": config.tokens,
        "image_size": config.img_size,
        "channels_last": config.channels_last == "on",
        "workers": config.workers,
        "held_out": config.held_out,
    }


def _check_target(config: TrainConfig, dataset: Dataset) -> None:
    """Refuse a loss that needs no training; for a text, 95 may have been meant as an accuracy."""
    if config.target is not None and dataset.kind == "text":
        guessing = math.log(dataset.classes)
        if config.target >= guessing:
            raise UsageError(
                f"--target {config.target:g} would be reached without training: guessing among "
                f"{dataset.classes} tokens has a loss of {guessing:.2f} nats per token"
            )


def plan_epoch(config: TrainConfig, process: Process, epoch: int, first: int = 0) -> Plan:
    """Plan the batches that this process takes in an epoch, starting with its step `first`.

    A process takes its share of a batch in as few equal micro-batches as --micro-batch-size allows.
    """
    share = max(config.batch_size // process.ranks, 1)
    limit = min(config.micro_batch_size or share, share)
    micro_batches = next(n for n in range(-(-share // limit), share + 1) if share % n == 0)
    rank, ranks = process.rank, process.ranks
    return Plan(config.batch_size, micro_batches, config.seed, epoch, first, rank, ranks)
