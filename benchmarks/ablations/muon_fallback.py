"""Which learning rate Muon's AdamW needs, relative to that of its matrices.

    python -m benchmarks.ablations.muon_fallback --data-dir data
    python -m benchmarks.ablations.muon_fallback --table

Muon leaves biases and normalization to AdamW, at the same learning rate times a factor. Factor 1
makes their updates about five times as large as those of the matrices. The contest uses the factor
that does best here, in runs like those of its searches, so that its best peer has no handicap.
"""

import dataclasses
import itertools
import statistics
from pathlib import Path

from benchmarks.common.jobs import parse_shared
from benchmarks.common.ledger import MissingRunError
from benchmarks.common.markdown import format_table
from benchmarks.contest.entrants import ContestLedger, RunKey, Setting
from benchmarks.contest.trainer import Trainer, create_training_parser, open_runner
from benchmarks.contest.tuning import count_search_epochs
from neumann.lab.config import TrainConfig
from neumann.lab.optimizers.arms import Arm

FACTORS = (1.0, 0.2, 0.05)
SETTINGS = (
    (16384, Setting(0.04, 2.0, 0.6)),
    (16384, Setting(0.02, 0.5, 0.6)),
    (8192, Setting(0.04, 2.0, 0.6)),
)
PREFIX = "Muon × "


def make_key(factor: float, batch: int, setting: Setting) -> RunKey:
    epochs = count_search_epochs(batch)
    return RunKey("search", "resnet9", batch, epochs, f"{PREFIX}{factor:g}", setting)


class MuonTrainer(Trainer):
    """Trains Muon with the factor in the entrant's name."""

    def configure(self, key: RunKey) -> TrainConfig:
        config = super().configure(dataclasses.replace(key, entrant="Muon"))
        factor = float(key.entrant.removeprefix(PREFIX))
        arm = Arm.parse(config.opt).with_options(fallback_lr_scale=factor)
        return dataclasses.replace(config, opt=str(arm))


def format_scores(ledger: ContestLedger) -> str:
    scores = {
        (batch, setting): [ledger.score(make_key(factor, batch, setting)) for factor in FACTORS]
        for batch, setting in SETTINGS
    }
    rows = [
        [str(batch), f"{setting.lr:g}, {setting.decay:g}", *(f"{score:.2f}" for score in row)]
        for (batch, setting), row in scores.items()
    ]
    means = map(statistics.fmean, zip(*scores.values(), strict=True))
    rows.append(["mean", "", *(f"{mean:.2f}" for mean in means)])
    heads = ["batch", "lr, decay", *(f"× {factor:g}" for factor in FACTORS)]
    return format_table(heads, "rl" + "r" * len(FACTORS), rows)


def main() -> None:
    parser = create_training_parser(__doc__, Path("results/muon-fallback.jsonl"))
    parser.add_argument("--table", action="store_true", help="print the table, train nothing")
    arguments = parse_shared(parser)
    ledger, runner = open_runner(arguments, MuonTrainer)
    if arguments.table:
        try:
            print(format_scores(ledger))
        except MissingRunError:
            raise SystemExit(f"{arguments.results} does not have all runs yet") from None
        return
    for (batch, setting), factor in itertools.product(SETTINGS, FACTORS):
        runner.run(make_key(factor, batch, setting))


if __name__ == "__main__":
    main()
