"""Every comparison of two optimizers on the test set of CIFAR-10 or CIFAR-100, and its p.

All comparisons on one test set are one family, over which p is corrected by Holm's method. Settings
that were superseded after a test belong to it too. It is no longer certain which of them were
compared at the time, so all pairs count: every tested setting of an optimizer beside every one of
its rival. A comparison that got more seeds later counts once, with all its seeds.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.ledger import Run
from benchmarks.contest.entrants import ContestLedger, RunKey
from benchmarks.contest.recipe_runs import OURS as RECIPE
from benchmarks.contest.summary import scores_by_seed
from neumann.lab.studies.statistics import (
    Difference,
    correct_by_holm,
    paired_difference,
    select_common_seeds,
)

RESULTS = Path("results")
CIFAR10 = "large-batch.jsonl", "recipe-cifar10.jsonl"  # the contest, and the recipe
CIFAR100 = "cifar100.jsonl", "recipe-cifar100.jsonl"
BEST_PEER = "Muon"  # on held-out images, at every batch size; the others are compared with it
OTHER_FORMS = {"Neumann diagonal": "AdamW", "Neumann (paper)": "SGD-Nesterov"}  # and their rivals
SPECTRAL = "Neumann spectral"
RECIPE_SEEDS = range(10, 20), range(20, 30)  # of the first and the second test
# On CIFAR-100 the settings of CIFAR-10 had six comparisons. Eight with other learning rates are
# still to come. Their number was fixed before the first, so they count already.
PLANNED_ON_CIFAR100 = 6 + 8
RETUNED = "retuned"  # their stage: new seeds never mix with older runs of the same setting
TESTED = "final", RETUNED  # stages that are scored on a test set


class Comparison(NamedTuple):
    """Two optimizers in one test. The seed of a key is the first that the test allows."""

    ours: RunKey
    rival: RunKey


Leads = dict[Comparison, Difference]  # in points: positive if the first optimizer is ahead


@dataclass(frozen=True)
class Family:
    """All comparisons on one test set."""

    leads: Mapping[Comparison, Difference]
    to_come: int = 0  # comparisons that are planned; until they are made, their p counts as 1

    def __len__(self) -> int:
        return len(self.leads) + self.to_come

    def correct(self) -> dict[Comparison, float]:
        """p of each comparison, corrected for all; 1 if there is none, as for a single seed."""
        known = [1.0 if lead.p is None else lead.p for lead in self.leads.values()]
        corrected = correct_by_holm([*known, *[1.0] * self.to_come])
        return dict(zip(self.leads, corrected, strict=False))


def find_cifar10(contest: ContestLedger, recipe: ContestLedger) -> Family:
    """The contest's tables, the two other forms beside their rivals, and the recipe."""

    def are_compared(ours: str, rival: str) -> bool:
        return OTHER_FORMS.get(ours) == rival or (rival == BEST_PEER and ours != BEST_PEER)

    return Family(compare_tested(contest, are_compared) | compare_recipe(recipe))


def find_cifar100(contest: ContestLedger, recipe: ContestLedger) -> Family:
    """The contest's settings, with its learning rates and others, and the recipe."""
    made = compare_tested(contest, lambda ours, rival: ours == SPECTRAL != rival)
    to_come = max(PLANNED_ON_CIFAR100 - len(made), 0)
    return Family(made | compare_recipe(recipe), to_come)


def load_families(folder: Path = RESULTS) -> dict[str, Family]:
    """The families of both test sets, from the published runs."""
    return {
        "CIFAR-10": find_cifar10(*(ContestLedger(folder / name) for name in CIFAR10)),
        "CIFAR-100": find_cifar100(*(ContestLedger(folder / name) for name in CIFAR100)),
    }


def compare_recipe(ledger: ContestLedger) -> Leads:
    """The untuned recipe beside each peer, in both tests."""
    leads: Leads = {}
    for seeds in RECIPE_SEEDS:
        leads |= compare_tested(ledger, lambda ours, rival: ours == RECIPE != rival, seeds)
    return leads


def compare_tested(
    ledger: ContestLedger, are_compared: Callable[[str, str], bool], seeds: range | None = None
) -> Leads:
    """Every tested setting of an optimizer beside every one of its rival, paired by seed.

    Runs of two stages are never compared.
    """
    runs: dict[RunKey, dict[int, Run]] = {}
    for key, run in ledger.runs.items():
        if key.stage in TESTED and (seeds is None or key.seed in seeds):
            first = replace(key, seed=0 if seeds is None else seeds.start)
            runs.setdefault(first, {})[key.seed] = run
    scores = {key: scores_by_seed(found) for key, found in runs.items()}
    leads = {}
    for ours, rival in itertools.permutations(scores, 2):
        alike = replace(rival, entrant=ours.entrant, setting=ours.setting) == ours
        if alike and are_compared(ours.entrant, rival.entrant):
            pairs = select_common_seeds(scores[ours], scores[rival])
            if pairs[0]:
                leads[Comparison(ours, rival)] = paired_difference(*pairs)
    return leads
