"""Does one learning rate suit image networks of several kinds? The best one on a grid.

    python -m benchmarks.contest.lr_by_network train --data-dir data
    python -m benchmarks.contest.lr_by_network table

`recipe` is what `neumann.large_batch` does. `one for all` is what the library had before: the
spectral P for every matrix, and a weight decay of 8 / (lr · steps), in the middle of what its
documentation recommended. Learning rates are in ratio 2; each network is trained with more of them
until the best has a worse one on both sides. Scores are % of 5,000 held-out images after 24 epochs.
Runs are lines of results/lr-by-network.jsonl and are not repeated.
"""

import argparse
import itertools
from pathlib import Path

from benchmarks.common.jobs import parse_shared
from benchmarks.common.ledger import MissingRunError, Runner, claim
from benchmarks.common.markdown import format_table
from benchmarks.common.search import find_bracketed_best
from benchmarks.contest.entrants import ContestLedger, RunKey, Setting, read_accuracy
from benchmarks.contest.recipe_runs import OURS, RecipeTrainer, make_recipe
from benchmarks.contest.trainer import create_training_parser, open_runner

IMAGES = 45_000  # for training; the others are held out
EPOCHS = 24
BEFORE = "one for all"
ARMS = (OURS, BEFORE)
FORGETTING = 8.0  # lr · decay · steps of BEFORE
VIT = "timm:vit_tiny_patch16_224,patch_size=4,depth=6"
NETWORKS = (("resnet9", 8192), ("resnet9", 512), (VIT, 8192), (VIT, 1024), ("resnet18", 8192))
LR = {OURS: 0.03, BEFORE: 0.015}


def make_key(arm: str, network: tuple[str, int], index: int, seed: int = 0) -> RunKey:
    """The run at a point of the grid of learning rates; 0 is the arm's LR."""
    model, batch = network
    lr = LR[arm] * 2.0**index
    setting, entrant = make_recipe(lr), OURS
    if arm == BEFORE:
        steps = EPOCHS * (IMAGES // batch)
        setting, entrant = Setting(lr, FORGETTING / (lr * steps), 0.6), "Neumann spectral"
    return RunKey("search", model, batch, EPOCHS, entrant, setting, seed)


def tune(runner: Runner[RunKey], arm: str, network: tuple[str, int]) -> int:
    """The index of the best learning rate; MissingRunError if the time is up."""

    def score(index: int, seed: int) -> float:
        return read_accuracy(runner.finish(make_key(arm, network, index, seed)))

    for index in (0, -1, 1):
        runner.run(make_key(arm, network, index))
    return find_bracketed_best(score, [(0, 0), (-1, 0), (1, 0)], 1)[0]


def print_table(ledger: ContestLedger) -> None:
    rows = []
    for arm, network in itertools.product(ARMS, NETWORKS):
        found = {}
        for index in range(-8, 9):
            runs = ledger.find_seeds(make_key(arm, network, index))
            if runs:
                found[index] = sum(map(read_accuracy, runs.values())) / len(runs)
        if found:
            best = max(found, key=lambda index: found[index])
            curve = ", ".join(f"{LR[arm] * 2.0**i:.4g}: {found[i]:.2f}" for i in found)
            default = f"{found[best] - found[0]:.2f}" if 0 in found else ""
            cells = f"{LR[arm] * 2.0**best:.4g}", f"{found[best]:.2f}", default, curve
            rows.append((arm, network[0], str(network[1]), *cells))
    heads = ("arm", "network", "batch", "best lr", "%", "points lost at the default", "all")
    print(format_table(heads, "llrrrrl", rows))


def main() -> None:
    parser = create_training_parser(__doc__, Path("results/lr-by-network.jsonl"))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("stage", choices=("train", "table"))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--networks", nargs="+", type=int, default=range(len(NETWORKS)))
    arguments = parse_shared(parser)
    ledger, runner = open_runner(arguments, RecipeTrainer)
    if arguments.stage == "train":
        for index, arm in itertools.product(arguments.networks, arguments.arms):
            with claim(arguments.share, (arm, index)) as claimed:
                if claimed:
                    try:
                        tune(runner, arm, NETWORKS[index])
                    except MissingRunError:
                        print("the time is up; run it again to continue")
    print_table(ledger)


if __name__ == "__main__":
    main()
