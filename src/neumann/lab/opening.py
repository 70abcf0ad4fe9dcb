"""The data of a configuration."""

from neumann.lab.config import TrainConfig
from neumann.lab.data import Dataset, load
from neumann.lab.processes import Process, led


def open_dataset(config: TrainConfig, process: Process | None = None) -> Dataset:
    """The data set, on the process's device; without its test set where a part is held out."""
    process = process or Process()

    def opened() -> Dataset:
        return load(
            config.data,
            data_dir=config.data_dir,
            download=config.download,
            device=process.device(config.device),
            flip=config.flip,
            shift=config.shift,
            cutout=config.cutout,
            context=config.context,
            image_size=config.img_size,
            channels_last=config.channels_last == "on",
            workers=config.workers,
        )

    if config.download:
        led(process, opened)  # one process fetches what the others find
    dataset = opened()
    return dataset.held_out() if config.held_out else dataset
