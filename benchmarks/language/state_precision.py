"""Does the recipe lose anything with its state in bfloat16?

    python -m benchmarks.language.state_precision train --data-dir data
    python -m benchmarks.language.state_precision table

500 steps of 16,384 tokens with `gpt:small`, five seeds, scored on the validation set. Both arms see
the same batches from the same weights; stochastic rounding is on, as it is by default. Runs are
lines of results/language/state-precision.jsonl and are not repeated.
"""

import itertools
from dataclasses import replace
from pathlib import Path

from benchmarks.common.ledger import Ledger
from benchmarks.common.markdown import format_difference, format_table
from benchmarks.language.language_arms import make_default_recipe
from benchmarks.language.language_runs import (
    RunKey,
    create_language_parser,
    open_language_runner,
    parse_language,
    read_loss,
)
from neumann.lab.studies.statistics import mean_interval, paired_difference, select_common_seeds

RESULTS = Path("results/language/state-precision.jsonl")
STATES = ("float32", "bfloat16")
TOKENS, STEPS = 16_384, 500
SEEDS = range(5)


def make_key(state: str, seed: int = 0) -> RunKey:
    setting = replace(make_default_recipe(STEPS), state=state)
    return RunKey("state", "gpt:small", 256, TOKENS, STEPS, setting, seed)


def print_table(ledger: Ledger[RunKey]) -> None:
    losses = {
        state: {seed: read_loss(run) for seed, run in ledger.find_seeds(make_key(state)).items()}
        for state in STATES
    }
    rows = []
    for state, found in losses.items():
        mean = mean_interval(list(found.values()))
        if mean.mean is None:
            continue
        spread = max(found.values()) - min(found.values())
        difference = paired_difference(*select_common_seeds(found, losses[STATES[0]]))
        worse = format_difference(difference.mean, difference.low, difference.high, digits=4)
        cells = f"{mean.mean:.4f}", f"{spread:.4f}", str(mean.n)
        rows.append((state, *cells, "" if state == STATES[0] else worse))
    print(format_table(("state", "loss", "spread of seeds", "n", "worse by"), "lrrrr", rows))


def main() -> None:
    parser = create_language_parser(__doc__, RESULTS)
    parser.add_argument("stage", choices=("train", "table"))
    arguments = parse_language(parser)
    ledger, runner = open_language_runner(arguments)
    if arguments.stage == "train":
        for seed, state in itertools.product(SEEDS, STATES):
            runner.run(make_key(state, seed))
    print_table(ledger)


if __name__ == "__main__":
    main()
