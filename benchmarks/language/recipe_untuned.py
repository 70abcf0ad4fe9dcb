"""Is the recipe, untuned, as good as AdamW and Muon after tuning?

    python -m benchmarks.language.recipe_untuned train --data-dir data --seconds 1200
    python -m benchmarks.language.recipe_untuned table

`tune` instead of `train` leaves out the test; --peers and --steps limit both to some of them.

AdamW and Muon (with AdamW for the rest) get a coordinate search of 12 runs each, scored on the
validation set. Muon's began with far too much decay and hardly got to its momentum, so it gets a
second one of 12 runs, in which lr · decay stays when the learning rate moves. The recipe gets none:
learning rate, decay and momenta are its defaults. Then each peer and the recipe train with the same
ten fresh seeds and are scored on the test set. Muon's seeds differ from AdamW's, because AdamW was
tested before Muon's second search, when the loss left out up to 127 windows at the end of a set.
Muon's steps are scaled by the shape of a matrix as ours are, which suits it better than torch's
scaling (1.93 against 2.01 nats in 200 steps of 131,072 tokens). Runs are lines of
results/language/recipe.jsonl and are not repeated; other data (--data) need another file
(--results).
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.ledger import Ledger, MissingRunError, Runner
from benchmarks.common.markdown import format_table
from benchmarks.common.peers_table import ALIGN, HEADS, compare_with_peers
from benchmarks.language.language_arms import Setting, make_default_recipe
from benchmarks.language.language_runs import (
    RunKey,
    create_language_parser,
    open_language_runner,
    parse_language,
)
from benchmarks.language.recipe_tests import LENGTHS, MUON, OURS, PEERS, SEEDS, find_tested
from benchmarks.language.search_space import find_point, search_setting

RESULTS = Path("results/language/recipe.jsonl")
RUNS = 12  # of a peer's search
AGAIN = ("before", "lr", "forgetting", "embedding", "output")  # what Muon's second search moves
MARGIN = 0.01  # nats that we may be worse


def make_key(stage: str, length: tuple[int, int], setting: Setting, seed: int = 0) -> RunKey:
    return RunKey(stage, "gpt:small", 256, *length, setting, seed)


def tune(runner: Runner[RunKey], arm: str, length: tuple[int, int]) -> Setting:
    """The best of the settings of a peer; MissingRunError if the time is up."""

    def score(setting: Setting) -> RunKey:
        return make_key("recipe", length, setting)

    best = search_setting(runner, arm, score, limit=RUNS)
    if arm == MUON:
        steps = length[1]
        start = find_point(best, steps)
        best = search_setting(runner, arm, score, AGAIN, RUNS, start=start, steps=steps)
    return best


def print_table(ledger: Ledger[RunKey]) -> None:
    rows: list[Sequence[str]] = []
    for tokens, steps in LENGTHS:
        for peer in PEERS:
            losses = {
                arm: find_tested(ledger, arm, (tokens, steps), SEEDS[peer]) for arm in (OURS, peer)
            }
            compared = compare_with_peers(losses, OURS, MARGIN, digits=4)
            rows += [(f"{tokens:,} × {steps}", arm, *cells) for arm, cells in compared.items()]
    print(f"test loss; the margin is {MARGIN} nats")
    print(format_table(("tokens × steps", "arm", *HEADS), "ll" + ALIGN, rows))


def main() -> None:
    parser = create_language_parser(__doc__, RESULTS)
    parser.add_argument("stage", choices=("tune", "train", "table"))
    parser.add_argument(
        "--peers", nargs="+", choices=PEERS, default=PEERS, help="whom to tune and to test"
    )
    parser.add_argument("--steps", type=int, help="only this length of runs")
    arguments = parse_language(parser)
    ledger, runner = open_language_runner(arguments)
    lengths = [length for length in LENGTHS if arguments.steps in (None, length[1])]
    try:
        if arguments.stage == "tune":
            for arm, length in itertools.product(arguments.peers, lengths):
                tune(runner, arm, length)
        elif arguments.stage == "train":
            train_all(runner, lengths, arguments.peers)
    except MissingRunError:
        print("the time is up; run it again to continue")
    print_table(ledger)


def train_all(
    runner: Runner[RunKey],
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    peers: Sequence[str] = PEERS,
) -> None:
    """Tune the peers, then test them and the recipe."""
    for length in lengths:
        ours = make_default_recipe(length[1])
        for peer in peers:
            tuned = tune(runner, peer, length)
            for seed, setting in itertools.product(SEEDS[peer], (ours, tuned)):
                runner.run(make_key("test", length, setting, seed))


if __name__ == "__main__":
    main()
