"""Does one learning rate suit image networks of several kinds? The best one on a grid.

    python -m benchmarks.contest.lr_by_network train --data-dir data --seeds 3
    python -m benchmarks.contest.lr_by_network table

`recipe` is what `neumann.large_batch` does. `by elements` is a candidate: the same, but with the
elements of all steps in hidden matrices equally large, so that wide layers change more.
`one for all` is what the library had before: the spectral P for every matrix, and a weight decay of
8 / (lr · steps), in the middle of what its documentation recommended. Learning rates are tried in
factors of 2 until the best has a worse one on both sides. With --seeds, the two best get further
seeds. Scores are % of 5,000 held-out images after 24 epochs. Runs are lines of
results/lr-by-network.jsonl and are not repeated.
"""

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.jobs import parse_shared
from benchmarks.common.ledger import MissingRunError, Runner
from benchmarks.common.markdown import format_table
from benchmarks.common.search import find_bracketed_best
from benchmarks.contest.entrants import ContestLedger, RunKey, Setting, read_accuracy
from benchmarks.contest.recipe_runs import OURS, RecipeTrainer, make_recipe
from benchmarks.contest.trainer import create_training_parser, open_runner
from neumann.lab.config import TrainConfig
from neumann.lab.storage.run_files import Summary
from neumann.lab.training.loop import Training
from neumann.optim.preconditioners import Spectral
from neumann.optim.recipe import LR as DEFAULT_LR

IMAGES = 45_000  # for training; the others are held out
EPOCHS = 24
CANDIDATE, BEFORE = "by elements", "one for all"
ARMS = (OURS, CANDIDATE, BEFORE)
# Root mean square of the candidate's steps at lr 1: the recipe's in a 3 × 3 kernel of 256 channels.
ELEMENT = (1 / 3) ** 0.5 / (256 * 9) ** 0.5
FORGETTING = 8.0  # lr · decay · steps of BEFORE
VIT = "timm:vit_tiny_patch16_224,patch_size=4,depth=6"
Network = tuple[str, int]  # model, batch size
NETWORKS: tuple[Network, ...] = (
    ("resnet9", 512),
    ("resnet9", 8192),
    ("resnet9:width=32", 8192),
    ("resnet9:width=16", 8192),
    ("resnet18", 8192),
    (VIT, 8192),
    (VIT, 1024),
)
LR = {OURS: DEFAULT_LR, CANDIDATE: DEFAULT_LR, BEFORE: 0.015}
FIRST = (0, -1, 1)  # indices on the grid that every network is trained with


class LrTrainer(RecipeTrainer):
    """Trains the recipe, the candidate and the contest's entrants."""

    def configure(self, key: RunKey) -> TrainConfig:
        entrant = OURS if key.entrant == CANDIDATE else key.entrant
        return super().configure(dataclasses.replace(key, entrant=entrant))

    def fit(self, key: RunKey, training: Training, folder: Path) -> Summary:
        if key.entrant == CANDIDATE:
            scale_by_elements(training.learner.optimizer)
        return super().fit(key, training, folder)


def scale_by_elements(optimizer: Any) -> None:
    """Make the elements of all steps in hidden matrices equally large."""
    for group in optimizer.param_groups:
        if group["role"] == "hidden":
            p: Spectral = group["precondition"]
            scale = ELEMENT * p.scale  # the factor for deep networks stays
            group["precondition"] = dataclasses.replace(p, scaling="rms", scale=scale)


def make_key(arm: str, network: Network, index: int, seed: int = 0) -> RunKey:
    """The run at a point of the grid of learning rates; 0 is the arm's LR."""
    model, batch = network
    lr = LR[arm] * 2.0**index
    setting, entrant = make_recipe(lr), arm
    if arm == BEFORE:
        steps = EPOCHS * (IMAGES // batch)
        setting, entrant = Setting(lr, FORGETTING / (lr * steps), 0.6), "Neumann spectral"
    return RunKey("search", model, batch, EPOCHS, entrant, setting, seed)


def tune(runner: Runner[RunKey], arm: str, network: Network) -> int:
    """The index of the best learning rate; MissingRunError if the time is up."""

    def score(index: int, seed: int) -> float:
        return read_accuracy(runner.finish(make_key(arm, network, index, seed)))

    return find_bracketed_best(score, [(index, 0) for index in FIRST], 1)[0]


def train_all(
    runner: Runner[RunKey], arms: Sequence[str], networks: Sequence[Network], seeds: int
) -> None:
    """Find the best rate of every network, then give it and the next best more seeds.

    Processes divide the first runs among them. Then each waits for what it needs of the others.
    """
    pairs = list(itertools.product(arms, networks))
    for (arm, network), index in itertools.product(pairs, FIRST):
        runner.run(make_key(arm, network, index))
    for arm, network in reversed(pairs):  # the slowest network comes first in NETWORKS
        best = tune(runner, arm, network)
        beside = [best - 1, best + 1]
        scores = {i: read_accuracy(runner.finish(make_key(arm, network, i))) for i in beside}
        second = max(beside, key=lambda index: scores[index])
        for seed, index in itertools.product(range(1, seeds), (best, second)):
            runner.run(make_key(arm, network, index, seed))


def print_table(ledger: ContestLedger) -> None:
    rows = []
    for arm, network in itertools.product(ARMS, NETWORKS):
        found = {}
        for index in range(-8, 9):
            runs = ledger.find_seeds(make_key(arm, network, index))
            if runs:
                found[index] = statistics.fmean(map(read_accuracy, runs.values())), len(runs)
        if found:
            best = max(found, key=lambda index: found[index][0])
            accuracy, seeds = found[best]
            curve = ", ".join(f"{LR[arm] * 2.0**i:.4g}: {found[i][0]:.2f}" for i in found)
            default = f"{accuracy - found[0][0]:.2f}" if 0 in found else ""
            cells = f"{LR[arm] * 2.0**best:.4g}", f"{accuracy:.2f}", str(seeds), default, curve
            rows.append((arm, network[0], str(network[1]), *cells))
    heads = ("arm", "network", "batch", "best lr", "%", "n", "points lost at the default", "all")
    print(format_table(heads, "llrrrrrl", rows))


def main() -> None:
    parser = create_training_parser(__doc__, Path("results/lr-by-network.jsonl"))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("stage", choices=("train", "table"))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--networks", nargs="+", type=int, default=range(len(NETWORKS)))
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parse_shared(parser)
    ledger, runner = open_runner(arguments, LrTrainer)
    if arguments.stage == "train":
        networks = [NETWORKS[index] for index in arguments.networks]
        try:
            train_all(runner, arguments.arms, networks, arguments.seeds)
        except MissingRunError:
            print("the time is up; run it again to continue")
    print_table(ledger)


if __name__ == "__main__":
    main()
