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

import contextlib
import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.common.jobs import parse_shared
from benchmarks.common.ledger import MissingRunError, Runner, claim
from benchmarks.common.markdown import format_cell, format_difference, format_table
from benchmarks.common.search import find_bracketed_best
from benchmarks.contest.entrants import ContestLedger, RunKey, Setting, read_accuracy
from benchmarks.contest.trainer import Trainer, create_training_parser, open_runner
from neumann.lab.studies.statistics import (
    Difference,
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


@dataclass(frozen=True)
class Score:
    """The test of an entrant."""

    lr: float
    accuracies: dict[int, float]  # in %, by seed


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


def find_scores(ledger: ContestLedger, unchanged: bool) -> dict[tuple[int, str], Score]:
    """By batch and entrant; an entrant whose learning rate is not chosen yet is left out."""
    find = find_tuned_before if unchanged else functools.partial(choose, ledger.score)
    scores = {}
    for batch, entrant in itertools.product(BATCHES, ENTRANTS):
        with contextlib.suppress(MissingRunError):
            setting = find(entrant, batch)
            found = ledger.find_seeds(make_key("final", entrant, batch, setting))
            own = {seed: read_accuracy(run) for seed, run in found.items() if seed < SEEDS}
            scores[batch, entrant] = Score(setting.lr, own)
    return scores


def find_leads(scores: dict[tuple[int, str], Score]) -> dict[tuple[int, str], Difference]:
    """How far we are ahead of each peer, paired by seed."""
    leads = {}
    for (batch, entrant), score in scores.items():
        ours = scores.get((batch, OURS))
        if entrant != OURS and ours is not None:
            common = select_common_seeds(ours.accuracies, score.accuracies)
            leads[batch, entrant] = paired_difference(*common)
    return leads


def correct_leads(ledger: ContestLedger, unchanged: bool) -> dict[tuple[int, str], float]:
    """p of our leads, corrected over every comparison on this test set, the earlier ones included.

    Comparisons that are still to come count too: their number was fixed before the first.
    """
    known = {
        (is_earlier, pair): lead.p
        for is_earlier in (True, False)
        for pair, lead in find_leads(find_scores(ledger, is_earlier)).items()
        if lead.p is not None
    }
    tested = sum(not is_earlier for is_earlier, _ in known)
    to_come = [1.0] * (len(BATCHES) * (len(ENTRANTS) - 1) - tested)
    corrected = correct_by_holm([*known.values(), *to_come])
    return {
        pair: p
        for (is_earlier, pair), p in zip(known, corrected, strict=False)
        if is_earlier == unchanged
    }


def format_scores(ledger: ContestLedger, unchanged: bool = False) -> str:
    """Means with 95 % intervals, and our paired leads."""
    scores = find_scores(ledger, unchanged)
    leads, p_values = find_leads(scores), correct_leads(ledger, unchanged)
    rows = []
    for (batch, entrant), score in scores.items():
        mean = mean_interval(list(score.accuracies.values()))
        interval = "" if mean.low is None else f"{mean.low:.2f} to {mean.high:.2f}"
        cells = f"{score.lr:.3g}", str(mean.n), format_cell(mean.mean, "{:.2f}"), interval
        lead = leads.get((batch, entrant))
        ahead = "" if lead is None else format_difference(lead.mean, lead.low, lead.high)
        p = format_cell(p_values.get((batch, entrant)), "{:.2g}")
        rows.append((str(batch), entrant, *cells, ahead, p))
    heads = ["batch", "optimizer", "lr", "seeds", "accuracy, %", "95 % interval"]
    heads += ["lead of the spectral form", "p (Holm)"]
    return format_table(heads, "rlrrrrrr", rows)


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
