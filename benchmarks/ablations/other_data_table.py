"""The contest's settings on CIFAR-100: who is tested, with which learning rate, and the table.

p is corrected for every comparison that touched the test set (`image_families`). Tests that are
still to come count too: their number was fixed before the first.
"""

import contextlib
import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.common.ledger import MissingRunError
from benchmarks.common.markdown import format_cell, format_difference, format_table
from benchmarks.common.search import find_bracketed_best
from benchmarks.contest.entrants import ContestLedger, RunKey, Setting
from benchmarks.contest.image_families import RETUNED, Comparison, Family
from benchmarks.contest.image_families import SPECTRAL as OURS
from benchmarks.contest.summary import scores_by_seed
from neumann.lab.studies.statistics import mean_interval

ENTRANTS = (OURS, "Muon", "LAMB", "AdamW", "SGD-Nesterov")
BATCHES = (512, 8192)
EPOCHS = 24
SEEDS = 5
EARLIER = "final"  # stage of the test with unchanged learning rates


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


def find_tested(ledger: ContestLedger, unchanged: bool) -> dict[tuple[int, str], RunKey]:
    """By batch and entrant, at seed 0; without entrants whose learning rate is not chosen yet."""
    find = find_tuned_before if unchanged else functools.partial(choose, ledger.score)
    stage = EARLIER if unchanged else RETUNED
    tested = {}
    for batch, entrant in itertools.product(BATCHES, ENTRANTS):
        with contextlib.suppress(MissingRunError):
            tested[batch, entrant] = make_key(stage, entrant, batch, find(entrant, batch))
    return tested


def format_scores(ledger: ContestLedger, family: Family, unchanged: bool = False) -> str:
    """Means with 95 % intervals, and our paired leads with p corrected for the family.

    Of the earlier test with unchanged learning rates, only the entrants that took part.
    """
    tested, p_values = find_tested(ledger, unchanged), family.correct()
    rows = []
    for (batch, entrant), key in tested.items():
        scores = scores_by_seed(ledger.find_seeds(key))
        if unchanged and not scores:
            continue
        mean = mean_interval(list(scores.values()))
        interval = "" if mean.low is None else f"{mean.low:.2f} to {mean.high:.2f}"
        lr = f"{key.setting.lr:.3g}"
        cells = str(batch), entrant, lr, str(mean.n), format_cell(mean.mean, "{:.2f}"), interval
        ahead = p = ""
        if (batch, OURS) in tested:
            comparison = Comparison(tested[batch, OURS], key)
            lead = family.leads.get(comparison)
            if lead is not None and lead.p is not None:
                ahead = format_difference(lead.mean, lead.low, lead.high)
                p = f"{p_values[comparison]:.2g}"
        rows.append((*cells, ahead, p))
    heads = ["batch", "optimizer", "lr", "seeds", "accuracy, %", "95 % interval"]
    heads += ["lead of the spectral form", "p (Holm)"]
    return format_table(heads, "rlrrrrrr", rows)
