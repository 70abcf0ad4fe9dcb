"""Which P, learning rates, momenta and decay suit each role of a GPT? A coordinate search per arm.

    python -m benchmarks.language.tune_roles train --data-dir data --seconds 1200
    python -m benchmarks.language.tune_roles table

One coordinate after another moves to its best value, until none moves any more. The rates of
embedding and output layer are coordinates of their own: they stay where they are when the rate of
the hidden matrices moves. --sweep trains all values of a coordinate around the best point. The
score is the validation loss of seed 0. Runs are lines of results/language/roles.jsonl and are not
repeated.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.ledger import Ledger, MissingRunError, Runner
from benchmarks.common.markdown import format_table
from benchmarks.language.language_arms import Setting
from benchmarks.language.language_runs import (
    RunKey,
    create_language_parser,
    open_language_runner,
    parse_language,
)
from benchmarks.language.search_space import GRIDS, ORDER, START, search_setting

RESULTS = Path("results/language/roles.jsonl")


def search(arguments: argparse.Namespace, runner: Runner[RunKey], arm: str) -> Setting:
    """The setting that no coordinate improves; MissingRunError if the time is up."""

    def make_key(setting: Setting) -> RunKey:
        size = arguments.model, 256, arguments.batch_tokens, arguments.steps
        return RunKey("roles", *size, setting, seed=0)

    best = search_setting(runner, arm, make_key, arguments.coordinates)
    for name in arguments.sweep:
        for value in GRIDS[name]:
            changed: dict[str, Any] = {name: value}
            runner.run(make_key(replace(best, **changed)))
    return best


def print_table(arguments: argparse.Namespace, ledger: Ledger[RunKey]) -> None:
    rows = []
    for arm in arguments.arms:
        losses = {
            key: run["loss"]
            for key, run in ledger.runs.items()
            if key.setting.arm == arm
            and key.seed == 0
            and run["loss"] is not None
            and (key.model, key.tokens_per_step, key.steps)
            == (arguments.model, arguments.batch_tokens, arguments.steps)
        }
        for key in sorted(losses, key=lambda key: losses[key])[: arguments.rows]:
            s = key.setting
            rates = (f"{s.lr * scale:.3g}" for scale in (1, s.embedding, s.output))
            rest = (f"{value:g}" for value in (s.momentum, s.before, s.decay, s.cooling))
            rows.append((arm, f"{losses[key]:.4f}", *rates, *rest, str(len(losses))))
    names = ("arm", "loss", "lr", "embedding", "output", "μ", "before", "decay", "cooling", "runs")
    print(format_table(names, "lrrrrrrrrr", rows))


def main() -> None:
    parser = create_language_parser(__doc__, RESULTS)
    parser.add_argument("stage", choices=("train", "table"))
    parser.add_argument("--arms", nargs="+", choices=list(START), default=list(START))
    parser.add_argument("--model", default="gpt:small")
    parser.add_argument("--coordinates", nargs="+", choices=ORDER, default=ORDER)
    swept = ("momentum", "before", "decay", "cooling")
    parser.add_argument("--sweep", nargs="+", choices=swept, default=[])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-tokens", type=int, default=131_072)
    parser.add_argument("--rows", type=int, default=3, help="best settings per arm in the table")
    arguments = parse_language(parser)
    ledger, runner = open_language_runner(arguments)
    if arguments.stage == "train":
        for arm in arguments.arms:
            try:
                search(arguments, runner, arm)
            except MissingRunError:
                continue
    print_table(arguments, ledger)


if __name__ == "__main__":
    main()
