"""The lines of the records as TensorBoard's events."""

from pathlib import Path
from typing import Any

from neumann.lab.errors import missing_package

FOLDER = "tensorboard"


class TensorBoard:
    """Writes every number of a line under its name, against the step."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """Events after `first_step`, which a run that goes on will repeat, are hidden."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_package("tensorboard", "tensorboard", "--tensorboard") from error
        self._writer = SummaryWriter(str(folder / FOLDER), purge_step=first_step + 1)

    def write(self, line: dict[str, Any]) -> None:
        """Add a line of the records."""
        step = line["step"]
        for name, value in _numbers(line):
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Have everything on disk."""
        self._writer.close()


def _numbers(line: dict[str, Any]) -> list[tuple[str, float]]:
    """(step/train_loss, 0.3), (epoch/accuracy, 97.2), (optimizer/distance, 0.1), …"""
    found = []
    for key, value in line.items():
        if isinstance(value, dict):
            found += [(f"{key}/{name}", number) for name, number in value.items()]
        elif key != "step":
            found.append((f"{line['kind']}/{key}", value))
    return [(k, float(v)) for k, v in found if isinstance(v, int | float)]
