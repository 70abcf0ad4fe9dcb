"""`neumann demo`: five optimizers on scikit-learn's digits in 40 large steps.

Learning rates and weight decay were chosen on held-out images by the search of studies/demo.toml,
with the same number of learning rates for each; results/demo-rates.json has all of its numbers. A
test compares what stands here with both files. The network is an MLP, the only one that reads
digits.
"""

import shutil
import textwrap
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.table import Table
from rich.text import Text

from neumann.extras import describe_install
from neumann.lab.commands.demo_verdict import EVIDENCE, state_verdict
from neumann.lab.commands.study import refuse_torchrun, run_and_print
from neumann.lab.commands.tables import format_score
from neumann.lab.commands.terminal import make_table, print_table
from neumann.lab.contenders import Contender
from neumann.lab.report.formatting import format_interval
from neumann.lab.report.result_tables import describe_target
from neumann.lab.storage.folders import new_run_folder
from neumann.lab.studies.engine import Study
from neumann.lab.studies.results import Comparison
from neumann.lab.studies.settings import CompareConfig

ARMS = {
    "Neumann spectral": "neumann-spectral:weight_decay=auto,lr=0.03",
    "Muon": "muon:lr=0.04",
    "AdamW": "adamw:lr=0.04@weight_decay=1.0",
    "Nesterov SGD": "sgd:lr=0.2",
    "Neumann (paper)": "neumann:lr=0.4",
}
BATCH_SIZE, STEPS, STEPS_PER_EPOCH = 512, 40, 2
CHOSEN = (
    "We chose learning rates and weight decay on held-out images, and tried the same number of "
    "learning rates for each optimizer (studies/demo.toml)."
)
TARGET = 95.0  # accuracy in %


@dataclass(frozen=True)
class DemoConfig:
    """Compare two forms of Neumann with Muon, AdamW and Nesterov SGD on digits.

    Each takes 40 steps of batch 512, at a learning rate chosen for it on held-out images.
    """

    output: Path | None = None
    """folder for the records; by default a new one, runs/demo-N"""
    seeds: int = 5
    """runs of each optimizer"""
    jobs: int = 2
    """runs trained side by side, each on one core"""

    def make_comparison(self) -> CompareConfig:
        return CompareConfig(
            arms=tuple(f"{name}={ARMS[name]}" for name in list_arms()),
            seeds=self.seeds,
            jobs=self.jobs,
            data="digits",
            model="mlp",
            batch_size=BATCH_SIZE,
            epochs=STEPS // STEPS_PER_EPOCH,
            sched="linear",
            ramp="3%",
            target=TARGET,
            checkpoint_every=0,
            device="cpu",
        )

    def choose_folder(self) -> Path:
        return self.output or new_run_folder("demo")


def list_arms() -> list[str]:
    """The optimizers that can run here: Muon needs timm, which not every environment has."""
    return [name for name in ARMS if name != "Muon" or find_spec("timm") is not None]


def run(config: DemoConfig) -> None:
    refuse_torchrun("demo")
    torch.set_num_threads(1)  # the network is too small for more
    comparison, folder = config.make_comparison(), config.choose_folder()
    comparison.check()
    seeds = "one seed" if config.seeds == 1 else f"{config.seeds} seeds"
    print(f"scikit-learn's digits, an MLP, {STEPS} steps of batch {BATCH_SIZE}, {seeds}")
    if len(comparison.arms) < len(ARMS):
        print(f"without Muon, which needs timm: {describe_install('timm')}")
    print(flush=True)
    run_and_print(Study.of(comparison, folder), print_comparison=print_result)


def print_result(comparison: Comparison) -> None:
    print_table(tabulate(comparison), [])
    width = shutil.get_terminal_size().columns - 1
    evidence = f"{EVIDENCE} {CHOSEN}" if comparison.seeds > 1 else CHOSEN
    for paragraph in (state_verdict(comparison, STEPS), evidence):
        print(f"\n{textwrap.fill(paragraph, width)}")
    print()


def tabulate(comparison: Comparison) -> Table:
    """A smaller table than that of `compare`, for 80 columns."""
    first, metric = comparison.rows[0].arm, comparison.metric
    target = metric.format_target(TARGET)
    titles = ("\noptimizer", "learning\nrate", f"{metric.name}\n{metric.unit}")
    table = make_table(*titles, f"{first}\nahead by", f"steps to\n{target}")
    for row in comparison.rows:
        difference = row.difference
        ahead = "" if difference is None else format_interval(difference, metric, signed=True)
        steps, _ = describe_target(list(row.runs.values()))
        reached = f"{steps.text} ({steps.note})" if steps.note else steps.text
        lr = f"{Contender.parse(row.text).arm.lr():g}"
        score = format_score(row.score, metric)
        table.add_row(*map(Text, (row.arm, lr, score, ahead, reached)))
    return table
