"""`neumann demo`: five optimizers on scikit-learn's digits, each at a learning rate tuned for it.

The learning rates were chosen on held-out data with equal budgets by

    neumann sweep --arms neumann sgd rmsprop adam adamw --epochs 40 --search-seeds 5
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from neumann.lab.commands.study import refuse_torchrun, run_and_print
from neumann.lab.storage.folders import new_run_folder
from neumann.lab.studies.engine import Study
from neumann.lab.studies.settings import CompareConfig

ARMS = ("neumann:lr=0.05", "sgd:lr=0.1", "rmsprop:lr=0.001", "adam:lr=0.004", "adamw:lr=0.004")


@dataclass(frozen=True)
class DemoConfig:
    """Compare Neumann with SGD (Nesterov), RMSProp, Adam and AdamW on digits."""

    output: Path | None = None
    """folder for the records; by default a new one, runs/demo-N"""
    seeds: int = 3
    """runs of each optimizer"""
    jobs: int = 2
    """runs trained side by side, each on one core"""

    def make_comparison(self) -> CompareConfig:
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

    def choose_folder(self) -> Path:
        return self.output or new_run_folder("demo")


def run(config: DemoConfig) -> None:
    refuse_torchrun("demo")
    torch.set_num_threads(1)  # the network is too small for more
    run_and_print(Study.of(config.make_comparison(), config.choose_folder()))
