"""Do the settings that were tuned on CIFAR-10 hold on CIFAR-100? Only the learning rate is retuned.

    python -m benchmarks.ablations.other_data tune --data-dir data --jobs 6
    python -m benchmarks.ablations.other_data test --data-dir data --jobs 6
    python -m benchmarks.ablations.other_data table

ResNet-9, 24 epochs, batches of 512 and 8192. Each optimizer has the decay and momentum that the
contest chose for it on held-out CIFAR-10 images (results/large-batch.json). Its learning rate is
chosen again, on held-out CIFAR-100 images, in factors of √2, until the best has a worse one on both
sides. Then it is scored on the CIFAR-100 test set, over five seeds. Every run is a line in
results/cifar100.jsonl and is not repeated. `table --unchanged` shows an earlier test, of an older
version and with the learning rates of CIFAR-10. Its runs have a stage of their own: where a
learning rate stays the same, their seeds do not mix with new ones. p is corrected for every
comparison on the test set (image_families).
"""

import itertools
from pathlib import Path

from benchmarks.ablations.other_data_table import (
    BATCHES,
    ENTRANTS,
    SEEDS,
    choose,
    format_scores,
    make_key,
)
from benchmarks.common.jobs import parse_shared, require_results
from benchmarks.common.ledger import MissingRunError, Runner, claim
from benchmarks.contest.entrants import ContestLedger, RunKey, read_accuracy
from benchmarks.contest.image_families import CIFAR100, RETUNED, find_cifar100
from benchmarks.contest.trainer import Trainer, create_training_parser, open_runner


def run_tuning(runner: Runner[RunKey]) -> None:
    """Find the learning rate of every entrant; MissingRunError if the time is up."""
    for batch, entrant in itertools.product(BATCHES, ENTRANTS):
        with claim(runner.share, (entrant, batch)) as claimed:
            if claimed:
                choose(lambda key: read_accuracy(runner.finish(key)), entrant, batch)


def run_tests(ledger: ContestLedger, runner: Runner[RunKey]) -> None:
    """Test every entrant that is tuned; MissingRunError if one is not."""
    chosen = {pair: choose(ledger.score, *pair) for pair in itertools.product(ENTRANTS, BATCHES)}
    for seed, (entrant, batch) in itertools.product(range(SEEDS), chosen):
        runner.run(make_key(RETUNED, entrant, batch, chosen[entrant, batch], seed))


def main() -> None:
    parser = create_training_parser(__doc__, Path("results/cifar100.jsonl"))
    parser.add_argument("stage", choices=("tune", "test", "table"))
    parser.add_argument("--unchanged", action="store_true", help="learning rates of CIFAR-10")
    parser.set_defaults(data="cifar100")
    arguments = parse_shared(parser)
    recipe = Path("results") / CIFAR100[1]
    require_results(parser, recipe)
    ledger, runner = open_runner(arguments, Trainer)
    try:
        if arguments.stage == "tune":
            run_tuning(runner)
        elif arguments.stage == "test":
            run_tests(ledger, runner)
    except MissingRunError:
        print("not all learning rates are chosen yet: run `tune` to continue")
    family = find_cifar100(ledger, ContestLedger(recipe))
    print(format_scores(ledger, family, arguments.unchanged))


if __name__ == "__main__":
    main()
