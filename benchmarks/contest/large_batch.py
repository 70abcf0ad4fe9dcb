"""The large-batch contest: CIFAR-10, ResNet-9, 24 epochs, batch 512 to 16384, ten optimizers.

    python -m benchmarks.contest.large_batch search --batch 8192 --data-dir data --seconds 1200
    python -m benchmarks.contest.large_batch retune --batch 8192 --data-dir data
    python -m benchmarks.contest.large_batch final --batch 8192 --data-dir data --seeds 5
    python -m benchmarks.contest.large_batch table

The stages:

search    tunes every optimizer by the same rules (benchmarks/contest/tuning.py) on the 5,000
          training images that the lab holds out, in runs of 12 epochs (24 at batch 16384)
retune    tunes the contenders at batch 8192 and above again, in as many steps as the final runs
          have, once all searches are finished
final     retrains each winner on all 50,000 images for 24 epochs and tests it, over paired seeds
range     finds the learning rates within a point of the best
transfer  takes the settings to ResNet-18 and tunes nothing but the learning rate again
time      trains each winner for 4 epochs to time it; run it alone on the machine
table     compares the winners, and writes the JSON that update_pages and draw_figure read; p is
          corrected for every comparison on the test set (image_families)
tested    lists every setting that was ever scored on the test set, chosen or not

Every run is a line in results/large-batch.jsonl and is not repeated, and `--seconds` limits how
long new runs are started, so the contest can be held in many sittings. `--jobs 6` trains six runs
side by side; on one GPU this pays if a run does not fill it.
"""

import json
from pathlib import Path

from benchmarks.common.jobs import parse_shared, require_results
from benchmarks.common.ledger import MissingRunError
from benchmarks.contest.entrants import ENTRANTS, RESULTS, ContestLedger, Setting
from benchmarks.contest.image_families import CIFAR10, find_cifar10
from benchmarks.contest.markdown_tables import format_summaries, format_tested
from benchmarks.contest.stages import BATCHES, Contest, ContestOptions
from benchmarks.contest.trainer import Trainer, create_training_parser, open_runner

STAGES = ["search", "retune", "final", "range", "transfer", "time", "table", "tested"]


def main() -> None:
    parser = create_training_parser(
        __doc__, RESULTS, "test this setting instead of the chosen one; only `tested` shows it"
    )
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--entrants", nargs="+", default=list(ENTRANTS), choices=list(ENTRANTS))
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds for each winner")
    parser.add_argument("--first-seed", type=int, default=0, help="to test, or to compare from")
    arguments = parse_shared(parser)
    ledger, runner = open_runner(arguments, Trainer)
    if arguments.stage == "tested":
        print(format_tested(ledger))
        return
    options = ContestOptions(
        batches=tuple(arguments.batch),
        entrants=tuple(arguments.entrants),
        seeds=arguments.seeds,
        first_seed=arguments.first_seed,
        setting=Setting(*arguments.setting) if arguments.setting else None,
        epochs=arguments.epochs,
    )
    contest = Contest(ledger, runner, options)
    if arguments.stage != "table":
        try:
            contest.run(arguments.stage)
        except MissingRunError:
            print("the time is up; run the same command again to continue")
        return
    found = contest.summarize(arguments.first_seed)
    if arguments.first_seed:  # the published table has all seeds, and p belongs to these
        print(format_summaries(found))
    else:
        recipe = Path("results") / CIFAR10[1]
        require_results(parser, recipe)
        family = find_cifar10(ledger, ContestLedger(recipe))
        print(format_summaries(found, family.correct()))
        arguments.results.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
