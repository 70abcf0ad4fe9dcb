"""The demo: five optimizers on scikit-learn's digits, each at a learning rate chosen for it.

All had the same budget: seven learning rates in ratio 2 about the usual one, five seeds each, on a
held-out tenth of the training set, never on the test set. Every best one was bracketed. The command
that chose them:

    neumann sweep --arms neumann sgd rmsprop adam adamw --epochs 40 --search-seeds 5

The differences it finds are small, and with three seeds it says so: digits is a set that any of the
five can learn.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

from neumann.lab.studies import CompareConfig

ARMS = ("neumann:lr=0.05", "sgd:lr=0.1", "rmsprop:lr=0.001", "adam:lr=0.004", "adamw:lr=0.004")


@dataclass(frozen=True)
class DemoConfig:
    """Compare Neumann with SGD (Nesterov), RMSProp, Adam and AdamW on digits."""

    output: Path | None = None
    """folder of the records; by default a new one, runs/demo-N"""
    seeds: int = 3
    """trainings of each optimizer"""
    jobs: int = 2
    """trainings side by side, each on one core: the network is too small to share"""

    def comparison(self) -> CompareConfig:
        """What is compared."""
        return CompareConfig(
            arms=ARMS,
            seeds=self.seeds,
            jobs=self.jobs,
            data="digits",
            model="mlp",
            epochs=40,
            target=97.0,
            checkpoint_every=10,
            device="cpu",
        )

    def folder(self) -> Path:
        """Where: as asked for, or new each time."""
        if self.output is not None:
            return self.output
        folders = (Path("runs") / f"demo-{number}" for number in itertools.count(1))
        return next(folder for folder in folders if not folder.exists())
