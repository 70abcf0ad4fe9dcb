"""Does one learning rate suit GPTs of all widths and depths? The best one on a grid, by scaling.

    python -m benchmarks.language.lr_by_width train --data-dir data --seconds 1200
    python -m benchmarks.language.lr_by_width table

`one for all` is the spectral P for every matrix, `recipe` what `neumann.param_groups` does, and
`spectral` a candidate: the same P by role, but with the elements of all steps equally large. Every
network is trained with learning rates in factors of 2 until the best has a worse one on each side;
with --seeds 3, these get two further seeds. Runs are lines of results/language/lr-by-width.jsonl
and are not repeated.
"""

import argparse
import itertools
from dataclasses import replace
from pathlib import Path

from benchmarks.common.ledger import Ledger, MissingRunError, Runner, claim
from benchmarks.common.markdown import format_table
from benchmarks.common.search import find_bracketed_best
from benchmarks.language.language_arms import Setting, make_recipe
from benchmarks.language.language_runs import (
    RunKey,
    create_language_parser,
    open_language_runner,
    parse_language,
    read_loss,
)
from neumann.optim.recipe import FORGETTING, LR

RESULTS = Path("results/language/lr-by-width.jsonl")
Size = tuple[int, int]  # width, depth
SIZES = ((1024, 6), (512, 6), (128, 6), (384, 12), (384, 2))
# Where the search of an arm starts. Everything but lr stays as it is.
START = {
    "one for all": Setting("one for all", 0.008),
    "recipe": make_recipe(LR, decay=0.0),  # decay follows from lr and steps
    "spectral": Setting("spectral", 0.004, decay=0.2, embedding=8.0, output=4.0),
    "muon": Setting("muon", 0.016),
    "muon by norm": Setting("muon by norm", 0.032, embedding=0.5, output=0.5),
    "adamw": Setting("adamw", 0.001, momentum=0.9, embedding=16.0, output=8.0),
}


def make_key(arguments: argparse.Namespace, arm: str, size: Size, index: int, seed: int) -> RunKey:
    setting = replace(START[arm], lr=START[arm].lr * 2.0**index)
    if arm == "recipe":
        setting = replace(setting, decay=FORGETTING / (setting.lr * arguments.steps))
    model = "gpt:width={},depth={}".format(*size)
    batch = arguments.batch_tokens
    return RunKey("width", model, 256, batch, arguments.steps, setting, seed)


def tune(arguments: argparse.Namespace, runner: Runner[RunKey], arm: str, size: Size) -> int:
    """The index of the best learning rate; MissingRunError if the time is up."""

    def score(index: int, seed: int) -> float:
        return -read_loss(runner.finish(make_key(arguments, arm, size, index, seed)))

    return find_bracketed_best(score, [(0, 0), (-1, 0), (1, 0)], 1)[0]


def print_table(arguments: argparse.Namespace, ledger: Ledger[RunKey]) -> None:
    rows = []
    for arm in arguments.arms:
        for size in arguments.sizes:
            found = {}
            for index in range(-8, 9):
                runs = ledger.find_seeds(make_key(arguments, arm, size, index, 0))
                losses = [run["loss"] for run in runs.values() if run["loss"] is not None]
                if losses:
                    found[index] = (sum(losses) / len(losses), len(losses))
            if not found:
                continue
            best = min(found, key=lambda index: found[index][0])
            start = START[arm].lr
            curve = ", ".join(f"{start * 2.0**i:.4g}: {found[i][0]:.4f}" for i in found)
            loss, seeds = found[best]
            rows.append(
                (arm, *map(str, size), f"{start * 2.0**best:.4g}", f"{loss:.4f}", str(seeds), curve)
            )
    print(format_table(("arm", "width", "depth", "best lr", "loss", "n", "all"), "lrrrrrl", rows))


def main() -> None:
    parser = create_language_parser(__doc__, RESULTS)
    parser.add_argument("stage", choices=("train", "table"))
    parser.add_argument("--arms", nargs="+", choices=list(START), default=list(START))
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=SIZES, metavar="WIDTHxDEPTH")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-tokens", type=int, default=32_768)
    arguments = parse_language(parser)
    ledger, runner = open_language_runner(arguments)
    if arguments.stage == "train":
        for size, arm in itertools.product(arguments.sizes, arguments.arms):
            with claim(arguments.share, (size, arm)) as claimed:
                if claimed:
                    train_size(arguments, runner, arm, size)
    print_table(arguments, ledger)


def train_size(arguments: argparse.Namespace, runner: Runner[RunKey], arm: str, size: Size) -> None:
    """Find the best learning rate of a network, then give it and its neighbours more seeds."""
    try:
        best = tune(arguments, runner, arm, size)
    except MissingRunError:
        print("the time is up; run it again to continue")
        return
    for index, seed in itertools.product((best, best - 1, best + 1), range(1, arguments.seeds)):
        runner.run(make_key(arguments, arm, size, index, seed))


def parse_size(text: str) -> Size:
    """Width and depth, from `384x6`."""
    width, _, depth = text.partition("x")
    return int(width), int(depth)


if __name__ == "__main__":
    main()
