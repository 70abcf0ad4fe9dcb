"""Is the recipe, untuned, as good as AdamW and Muon after tuning, on images?

    python -m benchmarks.contest.recipe_images train --data-dir data
    python -m benchmarks.contest.recipe_images train --data cifar100 --data-dir data
    python -m benchmarks.contest.recipe_images table

`tune` instead of `train` leaves out the test.

ResNet-9, batch 8192. AdamW and Muon get a coordinate search of 12 runs each on held-out images, in
as many steps as the final runs have; it starts at the setting that the contest chose for them. The
recipe gets none. Then all three train with ten fresh seeds and are scored on the test set. Runs
are lines of results/recipe-cifar10.jsonl or results/recipe-cifar100.jsonl and are not repeated.
`--seeds 10` shows the first test, of a recipe with more momentum; the numbers of today's recipe
were chosen after it.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.coordinates import Point, search_coordinates
from benchmarks.common.jobs import parse_shared, require_results
from benchmarks.common.ledger import MissingRunError, Runner
from benchmarks.common.markdown import format_table
from benchmarks.common.peers_table import ALIGN, HEADS, compare_with_peers
from benchmarks.contest.entrants import ContestLedger, RunKey, Setting, read_accuracy
from benchmarks.contest.recipe_runs import BATCH, OURS, PEERS, RecipeTrainer, make_recipe
from benchmarks.contest.trainer import create_training_parser, open_runner
from benchmarks.contest.tuning import FINAL_EPOCHS, count_full_epochs

DECAYS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
MOMENTA = (0.3, 0.6, 0.8, 0.9)
RUNS = 12  # of a peer's search
FIRST_SEED, SEEDS = 20, 10  # of the test
MARGIN = 0.2  # points that we may be worse


def make_key(stage: str, entrant: str, setting: Setting, seed: int = 0) -> RunKey:
    epochs = count_full_epochs(BATCH) if stage == "search" else FINAL_EPOCHS
    return RunKey(stage, "resnet9", BATCH, epochs, entrant, setting, seed)


def tune(runner: Runner[RunKey], entrant: str) -> Setting:
    """The best of the 12 settings of a peer; MissingRunError if the time is up."""

    def loss(point: Point) -> float:
        return -read_accuracy(runner.finish(make_key("search", entrant, Setting(**point))))

    def announce(point: Point) -> None:
        runner.run(make_key("search", entrant, Setting(**point)))

    start = PEERS[entrant]
    rates = tuple(start["lr"] * 2.0 ** (index / 2) for index in range(-8, 9))
    grids = {"lr": rates, "decay": DECAYS, "momentum": MOMENTA}
    return Setting(**search_coordinates(loss, start, grids, tuple(grids), announce, RUNS))


def find_best(ledger: ContestLedger, entrant: str) -> Setting | None:
    """The setting with the highest accuracy on held-out images so far."""
    if entrant == OURS:
        return make_recipe()
    found = {
        key.setting: read_accuracy(run)
        for key, run in ledger.runs.items()
        if (key.stage, key.entrant) == ("search", entrant)
    }
    return max(found, key=lambda setting: found[setting]) if found else None


def print_table(ledger: ContestLedger, seeds: range) -> None:
    errors = {}
    for entrant in (OURS, *PEERS):
        setting = find_best(ledger, entrant)
        if setting is not None:
            runs = ledger.find_seeds(make_key("final", entrant, setting))
            errors[entrant] = {s: 100 - read_accuracy(runs[s]) for s in seeds if s in runs}
    compared = compare_with_peers(errors, OURS, MARGIN, digits=2)
    rows: list[Sequence[str]] = [(entrant, *cells) for entrant, cells in compared.items()]
    print(f"test error in %; the margin is {MARGIN} points")
    print(format_table(("optimizer", *HEADS), "l" + ALIGN, rows))


def main() -> None:
    parser = create_training_parser(__doc__, Path())
    parser.add_argument("stage", choices=("tune", "train", "table"))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=tuple(PEERS), metavar="PEER")
    parser.add_argument("--seeds", type=int, default=FIRST_SEED, metavar="FIRST")
    parser.set_defaults(results=None)
    arguments = parse_shared(parser)
    arguments.results = arguments.results or Path(f"results/recipe-{arguments.data}.jsonl")
    if arguments.stage == "table":
        require_results(parser, arguments.results)
    seeds = range(arguments.seeds, arguments.seeds + SEEDS)
    ledger, runner = open_runner(arguments, RecipeTrainer)
    if arguments.stage != "table":
        try:
            tested = seeds if arguments.stage == "train" else range(0)
            train_all(runner, tested, arguments.peers)
        except MissingRunError:
            print("the time is up; run it again to continue")
    print_table(ledger, seeds)


def train_all(runner: Runner[RunKey], seeds: range, peers: Sequence[str] = tuple(PEERS)) -> None:
    """Tune the peers, then test everybody."""
    chosen = {OURS: make_recipe()} | {entrant: tune(runner, entrant) for entrant in peers}
    for seed, entrant in itertools.product(seeds, chosen):
        runner.run(make_key("final", entrant, chosen[entrant], seed))


if __name__ == "__main__":
    main()
