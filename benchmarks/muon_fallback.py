"""What learning rate Muon's AdamW wants, beside that of its matrices.

    python benchmarks/muon_fallback.py --data-dir data
    python benchmarks/muon_fallback.py --table

Muon leaves biases and normalisation to AdamW, with the same learning rate times a factor. With the
factor 1 their updates are about five times as large as those of the matrices, so the best peer of
the contest (`large_batch`) would be handicapped if it wanted less. The factor of the contest is the
one that does best here: ResNet-9 on CIFAR-10, scored on the 5,000 held-out training images, in the
contest's searches. Every run is a line in results/muon-fallback.jsonl; one that is there is not
repeated.
"""

import argparse
import dataclasses
import statistics
from pathlib import Path

from environment import origin
from large_batch import Trainer, add_training_arguments, search_epochs
from ledger import Key, Ledger, Missing, Setting

from neumann.lab.config import TrainConfig
from neumann.lab.optimizers import Arm

FACTORS = (1.0, 0.2, 0.05)
PLACES = (
    (16384, Setting(0.04, 2.0, 0.6)),
    (16384, Setting(0.02, 0.5, 0.6)),
    (8192, Setting(0.04, 2.0, 0.6)),
)


def key_of(factor: float, batch: int, setting: Setting) -> Key:
    return Key("search", "resnet9", batch, search_epochs(batch), f"Muon × {factor:g}", setting)


class MuonTrainer(Trainer):
    """Trains Muon with the factor that an entrant is named after."""

    def _config(self, key: Key) -> TrainConfig:
        config = super()._config(dataclasses.replace(key, entrant="Muon"))
        factor = float(key.entrant.removeprefix("Muon × "))
        arm = Arm.parse(config.opt).with_options(fallback_lr_scale=factor)
        return dataclasses.replace(config, opt=str(arm))


def table(ledger: Ledger) -> str:
    lines = [
        "| batch | lr, decay | " + " | ".join(f"× {factor:g}" for factor in FACTORS) + " |",
        "|--:|---|" + "--:|" * len(FACTORS),
    ]
    columns: list[list[float]] = [[] for _ in FACTORS]
    for batch, setting in PLACES:
        cells = [str(batch), f"{setting.lr:g}, {setting.decay:g}"]
        for column, factor in zip(columns, FACTORS, strict=True):
            column.append(ledger.score(key_of(factor, batch, setting)))
            cells.append(f"{column[-1]:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    means = [f"{statistics.fmean(column):.2f}" for column in columns]
    return "\n".join([*lines, "| mean | | " + " | ".join(means) + " |"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="train nothing")
    add_training_arguments(parser, Path("results/muon-fallback.jsonl"))
    arguments = parser.parse_args()
    ledger = Ledger(arguments.results, origin(arguments.commit))
    if arguments.table:
        try:
            print(table(ledger))
        except Missing:
            raise SystemExit(f"not all runs are in {arguments.results} yet") from None
        return
    trainer = MuonTrainer(ledger, arguments)
    for batch, setting in PLACES:
        for factor in FACTORS:
            trainer.take(key_of(factor, batch, setting))


if __name__ == "__main__":
    main()
