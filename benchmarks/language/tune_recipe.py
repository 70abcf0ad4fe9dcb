"""Which learning rate, decay, scales and momenta suit the recipe on text? A coordinate search.

    python -m benchmarks.language.tune_recipe train --data-dir data --seconds 600
    python -m benchmarks.language.tune_recipe train --coordinates --sweep forgetting …
    python -m benchmarks.language.tune_recipe table

benchmarks/common/recipe_space.py has the coordinates; an image network has the same search in
benchmarks.contest.tune_image_roles. The score is the validation loss. Runs are lines of
results/language/recipe-search.jsonl and are not repeated.
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.common.coordinates import Point
from benchmarks.common.ledger import Ledger, MissingRunError, Runner
from benchmarks.common.markdown import format_table
from benchmarks.common.recipe_space import START, add_search_flags, search_recipe
from benchmarks.language.language_arms import Setting
from benchmarks.language.language_runs import (
    RunKey,
    create_language_parser,
    open_language_runner,
    parse_language,
    read_loss,
)

RESULTS = Path("results/language/recipe-search.jsonl")
COORDINATES = ("lr", "forgetting", "output", "embedding", "vector", "momentum", "before", "eps")


def make_key(arguments: argparse.Namespace, point: Point) -> RunKey:
    values: dict[str, Any] = dict(point)
    decay = values.pop("forgetting") / (values["lr"] * arguments.steps)
    values["output_before"] = values.get("output_before") or None
    size = arguments.model, 256, arguments.batch_tokens, arguments.steps
    return RunKey("search", *size, Setting("recipe", decay=decay, **values), arguments.seed)


def tune(arguments: argparse.Namespace, runner: Runner[RunKey]) -> Point:
    def loss(point: Point) -> float:
        return read_loss(runner.finish(make_key(arguments, point)))

    def announce(point: Point) -> None:
        runner.run(make_key(arguments, point))

    return search_recipe(arguments, START, loss, announce)


def print_table(arguments: argparse.Namespace, ledger: Ledger[RunKey]) -> None:
    size = arguments.model, arguments.batch_tokens, arguments.steps
    found = {
        key: run["loss"]
        for key, run in ledger.runs.items()
        if (key.model, key.tokens_per_step, key.steps) == size and run["loss"] is not None
    }
    rows = []
    for key in sorted(found, key=lambda key: found[key])[: arguments.rows]:
        s = key.setting
        forgetting = s.lr * s.decay * key.steps
        values = (s.lr, forgetting, s.output, s.embedding, s.vector, s.momentum, s.before, s.eps)
        own = "" if s.output_before is None else f"{s.output_before:g}"
        rows.append((f"{found[key]:.4f}", *(f"{value:g}" for value in values), own, str(key.seed)))
    print(f"{len(found)} runs of {size}")
    heads = ("loss", *COORDINATES, "before, output", "seed")
    print(format_table(heads, "r" * len(heads), rows))


def main() -> None:
    parser = create_language_parser(__doc__, RESULTS)
    parser.add_argument("stage", choices=("train", "table"))
    parser.add_argument("--model", default="gpt:small")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-tokens", type=int, default=131_072)
    parser.add_argument("--rows", type=int, default=10, help="best settings in the table")
    add_search_flags(parser, (*COORDINATES, "output_before"))
    arguments = parse_language(parser)
    ledger, runner = open_language_runner(arguments)
    if arguments.stage == "train":
        try:
            tune(arguments, runner)
        except MissingRunError:
            print("the time is up; run it again to continue")
    print_table(arguments, ledger)


if __name__ == "__main__":
    main()
