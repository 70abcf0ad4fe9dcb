"""Do the settings that were tuned on CIFAR-10 hold on CIFAR-100? Only the learning rate is retuned.

    python -m benchmarks.ablations.other_data tune --data-dir data --jobs 6
    python -m benchmarks.ablations.other_data test --data-dir data --jobs 6
    python -m benchmarks.ablations.other_data table

ResNet-9, 24 epochs, batches of 512 and 8192. Each optimizer has the decay and momentum that the
contest chose for it on held-out CIFAR-10 images (results/large-batch.json). Its learning rate is
chosen again, on held-out CIFAR-100 images, in factors of √2, until the best has a worse one on both
sides. Then it is scored on the CIFAR-100 test set, over five seeds. Every run is a line in
results/cifar100.jsonl and is not repeated. `table --unchanged` shows an earlier test, with the
learning rates of CIFAR-10.
"""

import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.common.jobs import parse_shared
from benchmarks.common.ledger import MissingRunError, Runner, claim
from benchmarks.common.markdown import format_cell, format_difference, format_table
from benchmarks.common.search import find_bracketed_best
from benchmarks.contest.entrants import ContestLedger, RunKey, Setting, read_accuracy
from benchmarks.contest.trainer import Trainer, create_training_parser, open_runner
from neumann.lab.studies.statistics import (
    correct_by_holm,
    mean_interval,
    paired_difference,
    select_common_seeds,
)

OURS = "Neumann spectral"
ENTRANTS = (OURS, "Muon", "LAMB", "AdamW", "SGD-Nesterov")
BATCHES = (512, 8192)
EPOCHS = 24
SEEDS = 5


def make_key(stage: str, entrant: str, batch: int, setting: Setting, seed: int = 0) -> RunKey:
    return RunKey(stage, "resnet9", batch, EPOCHS, entrant, setting, seed)


def find_tuned_before(entrant: str, batch: int) -> Setting:
    """What the contest chose on CIFAR-10."""
    contest = json.loads(Path("results/large-batch.json").read_text())["resnet9"]
    rows = next(table["rows"] for table in contest if table["batch"] == batch)
    return Setting(**next(row["setting"] for row in rows if row["entrant"] == entrant))


def choose(score: Callable[[RunKey], float], entrant: str, batch: int) -> Setting:
    """The setting with the best learning rate; `score` raises MissingRunError for a missing run."""
    before = find_tuned_before(entrant, batch)

    def make(index: int) -> Setting:
        return replace(before, lr=before.lr * 2.0 ** (index / 2))

    best, _ = find_bracketed_best(
        lambda index, _: score(make_key("search", entrant, batch, make(index))),
        [(0, None), (-1, None), (1, None)],
        1,
    )
    return make(best)


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
        runner.run(make_key("final", entrant, batch, chosen[entrant, batch], seed))


def format_scores(ledger: ContestLedger, unchanged: bool = False) -> str:
    """Means with 95 % intervals, and our paired leads, corrected over all of them."""
    find = find_tuned_before if unchanged else functools.partial(choose, ledger.score)
    leads, rows = {}, {}
    for batch in BATCHES:
        ours: dict[int, float] = {}
        for entrant in ENTRANTS:
            try:
                setting = find(entrant, batch)
            except MissingRunError:
                continue
            found = ledger.find_seeds(make_key("final", entrant, batch, setting))
            own = {seed: read_accuracy(run) for seed, run in found.items() if seed < SEEDS}
            ours = own if entrant == OURS else ours
            mean = mean_interval(list(own.values()))
            interval = "" if mean.low is None else f"{mean.low:.2f} to {mean.high:.2f}"
            cells = f"{setting.lr:.3g}", str(mean.n), format_cell(mean.mean, "{:.2f}"), interval
            rows[batch, entrant] = [str(batch), entrant, *cells]
            if entrant != OURS:
                leads[batch, entrant] = paired_difference(*select_common_seeds(ours, own))
    # Comparisons that are still to come count too: their number was fixed before the first.
    known = {pair: lead.p for pair, lead in leads.items() if lead.p is not None}
    missing = [1.0] * (len(BATCHES) * (len(ENTRANTS) - 1) - len(known))
    corrected = correct_by_holm([*known.values(), *missing])
    p_values = dict(zip(known, corrected, strict=False))
    for pair, row in rows.items():
        lead = leads.get(pair)
        row += ["" if lead is None else format_difference(lead.mean, lead.low, lead.high)]
        row += [format_cell(p_values.get(pair), "{:.2g}")]
    heads = ["batch", "optimizer", "lr", "seeds", "accuracy, %", "95 % interval"]
    heads += ["lead of the spectral", "p (Holm)"]
    return format_table(heads, "rlrrrrrr", list(rows.values()))


def main() -> None:
    parser = create_training_parser(__doc__, Path("results/cifar100.jsonl"))
    parser.add_argument("stage", choices=("tune", "test", "table"))
    parser.add_argument("--unchanged", action="store_true", help="learning rates of CIFAR-10")
    parser.set_defaults(data="cifar100")
    arguments = parse_shared(parser)
    ledger, runner = open_runner(arguments, Trainer)
    try:
        if arguments.stage == "tune":
            run_tuning(runner)
        elif arguments.stage == "test":
            run_tests(ledger, runner)
    except MissingRunError:
        print("not all learning rates are chosen yet: run `tune` to continue")
    print(format_scores(ledger, arguments.unchanged))


if __name__ == "__main__":
    main()
