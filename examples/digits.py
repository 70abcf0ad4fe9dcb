"""Train a small network on scikit-learn's digits with Neumann and with Nesterov SGD.

Both get the same budget. The learning rate is chosen from the same grid, over three seeds, on a
held-out part of the training set. Then each trains on the whole training set with three seeds, and
is tested. This takes about a minute on a CPU.

    python examples/digits.py
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import mean, stdev

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from neumann import Neumann

EPOCHS = 40
BATCH = 64
GRID = (0.05, 0.1, 0.2, 0.4)
SEEDS = 3
TEST = HELD_OUT = 360

Build = Callable[[nn.Module, float, int], torch.optim.Optimizer]


@dataclass(frozen=True)
class Split:
    """Images (n, 64) in [0, 1] and labels (n,)."""

    x: Tensor
    y: Tensor

    def __getitem__(self, index: Tensor | slice) -> "Split":
        return Split(self.x[index], self.y[index])


def load_split() -> tuple[Split, Split]:
    """Return training and test images, the same split every time."""
    images, labels = load_digits(return_X_y=True)
    everything = Split(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return everything[order[TEST:]], everything[order[:TEST]]


def build_network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def train_and_test(
    build: Build, lr: float, seed: int, train: Split, test: Split, epoch_done: Callable[[], None]
) -> float:
    """Train for EPOCHS with a linear decay of the learning rate; return the accuracy in %."""
    torch.manual_seed(seed)
    model = build_network()
    steps = len(train.y) // BATCH
    optimizer = build(model, lr, steps)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=EPOCHS * steps)
    order = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        shuffled = train[torch.randperm(len(train.y), generator=order)]
        for first in range(0, steps * BATCH, BATCH):
            batch = shuffled[slice(first, first + BATCH)]
            optimizer.zero_grad()
            cross_entropy(model(batch.x), batch.y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        epoch_done()
    evaluating = optimizer.evaluating() if isinstance(optimizer, Neumann) else nullcontext()
    with evaluating, torch.no_grad():
        correct: Tensor = model(test.x).argmax(1) == test.y
    return 100 * correct.float().mean().item()


def score_all_seeds(
    build: Build, lr: float, train: Split, test: Split, epoch_done: Callable[[], None]
) -> list[float]:
    return [train_and_test(build, lr, seed, train, test, epoch_done) for seed in range(SEEDS)]


def build_neumann(model: nn.Module, lr: float, steps_per_epoch: int) -> torch.optim.Optimizer:
    return Neumann(model.parameters(), lr=lr, steps_per_epoch=steps_per_epoch)


def build_nesterov(model: nn.Module, lr: float, steps_per_epoch: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)


ARMS: dict[str, Build] = {"Neumann": build_neumann, "Nesterov SGD": build_nesterov}


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.set_num_threads(1)  # the network is too small for more
    train, test = load_split()
    tuning, held_out = train[slice(HELD_OUT, None)], train[slice(0, HELD_OUT)]
    console = Console()
    table = Table(title=f"digits, test accuracy after {EPOCHS} epochs (%)", title_justify="left")
    for column in ("optimizer", "lr", *(f"seed {seed}" for seed in range(SEEDS)), "mean ± std"):
        table.add_column(column, justify="left" if column == "optimizer" else "right")

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for name, build in ARMS.items():
            task = progress.add_task(name, total=EPOCHS * SEEDS * (len(GRID) + 1))
            epoch_done = partial(progress.advance, task)
            found = {
                lr: mean(score_all_seeds(build, lr, tuning, held_out, epoch_done)) for lr in GRID
            }
            lr = max(found, key=lambda lr: found[lr])
            scores = score_all_seeds(build, lr, train, test, epoch_done)
            spread = f"{mean(scores):.2f} ± {stdev(scores):.2f}"
            table.add_row(name, f"{lr:g}", *(f"{score:.2f}" for score in scores), spread)
    console.print(table)
    console.print(
        f"lr chosen from {', '.join(f'{lr:g}' for lr in GRID)} on {HELD_OUT} held-out training "
        "images, never on the test set.",
        style="dim",
    )


if __name__ == "__main__":
    main()
