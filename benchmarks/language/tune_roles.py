"""Which P, learning rates, momenta and decay suit each role of a GPT? A coordinate search per arm.

    python -m benchmarks.language.tune_roles train --data-dir data --seconds 1200
    python -m benchmarks.language.tune_roles table

One coordinate after another moves to its best value, until none moves any more. The rates of
embedding and output layer are coordinates of their own: they stay where they are when the rate of
the hidden matrices moves. The score is the validation loss of seed 0. Runs are lines of
results/language/roles.jsonl and are not repeated.
"""

import argparse
from pathlib import Path

from benchmarks.common.coordinates import Point, search_coordinates
from benchmarks.common.ledger import Ledger, MissingRunError, Runner
from benchmarks.common.markdown import format_table
from benchmarks.common.script import describe_origin
from benchmarks.language.language_arms import Setting
from benchmarks.language.language_runs import LanguageTrainer, RunKey, create_language_parser

RESULTS = Path("results/language/roles.jsonl")

# Every coordinate has a grid; a search may end at the edge of one.
RATES = tuple(0.001 * 2.0**index for index in range(-3, 9))
GRIDS: dict[str, tuple[float, ...]] = {
    "lr": RATES,
    "embedding": RATES,
    "output": RATES,
    "momentum": (0.0, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9),
    "before": (0.0, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95),
    "decay": (0.0, 0.05, 0.1, 0.2, 0.4, 0.8),
    "cooling": (0.0, 0.5, 1.0),
}

_SPECTRAL = {"lr": 0.004, "momentum": 0.6, "before": 0.8, "decay": 0.1, "cooling": 0.0}
_ADAMW = {"lr": 0.001, "momentum": 0.9, "decay": 0.1}
_MUON = {"lr": 0.016, "before": 0.8, "decay": 0.1}
START: dict[str, Point] = {
    "spectral": {**_SPECTRAL, "embedding": 0.032, "output": 0.016},
    "spectral embedding": {**_SPECTRAL, "embedding": 0.064, "output": 0.016},
    "spectral output": {**_SPECTRAL, "embedding": 0.032, "output": 0.032},
    "spectral everywhere": {**_SPECTRAL, "embedding": 0.064, "output": 0.032},
    "spectral by norm": {**_SPECTRAL, "embedding": 0.032, "output": 0.016},
    "muon": {**_MUON, "embedding": 0.008, "output": 0.032},
    "muon original": {**_MUON, "embedding": 0.016, "output": 0.016},
    "muon by norm": {**_MUON, "lr": 0.032, "embedding": 0.016, "output": 0.016},
    "normuon": {**_MUON, "embedding": 0.016, "output": 0.016},
    "soap": {"lr": 0.004, "momentum": 0.9, "decay": 0.1, "embedding": 0.016, "output": 0.016},
    "schedule-free": {**_ADAMW, "embedding": 0.016, "output": 0.008},
    "diagonal": {**_ADAMW, "embedding": 0.004, "output": 0.001},
    "paper": {**_ADAMW, "lr": 0.128, "embedding": 0.128, "output": 0.128},
    "adamw": {**_ADAMW, "embedding": 0.008, "output": 0.016},
}
ORDER = ("output", "lr", "embedding", "momentum", "before", "decay", "cooling")


def make_setting(arm: str, point: Point) -> Setting:
    """The setting at a point; rates become multiples of the learning rate."""
    rest = {role: point[role] / point["lr"] for role in ("embedding", "output")}
    return Setting(arm, **{**point, **rest})


def make_key(arguments: argparse.Namespace, arm: str, point: Point, seed: int = 0) -> RunKey:
    setting = make_setting(arm, point)
    return RunKey(
        "roles", arguments.model, 256, arguments.batch_tokens, arguments.steps, setting, seed
    )


def search(arguments: argparse.Namespace, runner: Runner[RunKey], arm: str) -> Point:
    """The point that no coordinate improves; MissingRunError if the time is up."""

    def loss(point: Point) -> float:
        found = runner.finish(make_key(arguments, arm, point))["loss"]
        return float("inf") if found is None else float(found)

    def announce(point: Point) -> None:  # another process may take one of them
        runner.run(make_key(arguments, arm, point))

    return search_coordinates(loss, START[arm], GRIDS, arguments.coordinates, announce)


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
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("stage", choices=("train", "table"))
    parser.add_argument("--arms", nargs="+", choices=list(START), default=list(START))
    parser.add_argument("--model", default="gpt:small")
    parser.add_argument("--coordinates", nargs="+", choices=ORDER, default=ORDER)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-tokens", type=int, default=131_072)
    parser.add_argument("--rows", type=int, default=3, help="best settings per arm in the table")
    arguments = parser.parse_args()
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(arguments.results, RunKey, describe_origin(arguments.commit))
    if arguments.stage == "train":
        trainer = LanguageTrainer(
            arguments.data, arguments.data_dir, arguments.tokens, arguments.device
        )
        runner = Runner(ledger, trainer.train, seconds=arguments.seconds, share=arguments.share)
        for arm in arguments.arms:
            try:
                search(arguments, runner, arm)
            except MissingRunError:
                continue
    print_table(arguments, ledger)


if __name__ == "__main__":
    main()
