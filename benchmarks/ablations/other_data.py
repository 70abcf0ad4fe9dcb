"""Do the settings that were tuned on CIFAR-10 hold on CIFAR-100? Nothing is tuned there.

    python -m benchmarks.ablations.other_data --data-dir data --seeds 5
    python -m benchmarks.ablations.other_data --table

ResNet-9, 24 epochs, batches of 512 and 8192. Each optimizer runs with the setting that the contest
chose for it on held-out CIFAR-10 images (results/large-batch.json), and is scored on the CIFAR-100
test set. Every run is a line in results/cifar100.jsonl and is not repeated.
"""

import itertools
import json
from pathlib import Path

from benchmarks.common.jobs import parse_shared
from benchmarks.common.markdown import format_cell, format_difference, format_table
from benchmarks.contest.entrants import ContestLedger, RunKey, Setting, read_accuracy
from benchmarks.contest.trainer import Trainer, create_training_parser, open_runner
from neumann.lab.studies.statistics import mean_interval, paired_difference, select_common_seeds

ENTRANTS = ("Neumann spectral", "Muon", "AdamW", "SGD-Nesterov")
BATCHES = (512, 8192)
EPOCHS = 24


def make_key(entrant: str, batch: int, seed: int = 0) -> RunKey:
    """The run with the setting that the contest chose on CIFAR-10."""
    contest = json.loads(Path("results/large-batch.json").read_text())["resnet9"]
    rows = next(table["rows"] for table in contest if table["batch"] == batch)
    setting = next(row["setting"] for row in rows if row["entrant"] == entrant)
    return RunKey("final", "resnet9", batch, EPOCHS, entrant, Setting(**setting), seed)


def format_scores(ledger: ContestLedger) -> str:
    """Means with 95 % intervals, and the spectral form's paired lead."""
    rows = []
    for batch in BATCHES:
        scores: dict[str, dict[int, float]] = {}
        for entrant in ENTRANTS:
            found = ledger.find_seeds(make_key(entrant, batch))
            scores[entrant] = {seed: read_accuracy(run) for seed, run in found.items()}
        for entrant, own in scores.items():
            mean = mean_interval(list(own.values()))
            lead = paired_difference(*select_common_seeds(scores[ENTRANTS[0]], own))
            interval = "" if mean.low is None else f"{mean.low:.2f} to {mean.high:.2f}"
            rows.append([str(batch), entrant, str(mean.n), format_cell(mean.mean, "{:.2f}")])
            rows[-1] += [interval, format_difference(lead.mean, lead.low, lead.high)]
            if entrant == ENTRANTS[0]:
                rows[-1][-1] = ""
    heads = ["batch", "optimizer", "seeds", "accuracy, %", "95 % interval", "lead of the spectral"]
    return format_table(heads, "rlrrrr", rows)


def main() -> None:
    parser = create_training_parser(__doc__, Path("results/cifar100.jsonl"))
    parser.add_argument("--table", action="store_true", help="print the table, train nothing")
    parser.add_argument("--seeds", type=int, default=5)
    parser.set_defaults(data="cifar100")
    arguments = parse_shared(parser)
    ledger, runner = open_runner(arguments, Trainer)
    seeds = range(0 if arguments.table else arguments.seeds)
    for seed, batch, entrant in itertools.product(seeds, BATCHES, ENTRANTS):
        runner.run(make_key(entrant, batch, seed))
    print(format_scores(ledger))


if __name__ == "__main__":
    main()
