"""The table of the site's start page: the untuned recipe beside its tuned peers.

AdamW took part in the first test only, Muon's numbers are those of the second.
"""

import statistics
from pathlib import Path

from benchmarks.common.ledger import Ledger
from benchmarks.common.markdown import format_table
from benchmarks.contest.entrants import ContestLedger, read_accuracy
from benchmarks.contest.image_families import CIFAR10, CIFAR100, RECIPE_SEEDS, RESULTS
from benchmarks.contest.recipe_runs import OURS
from benchmarks.language import recipe_tests
from benchmarks.language.language_runs import RunKey

HEADS = ("", "Neumann, untuned", "Muon, tuned", "AdamW, tuned")
LENGTH = recipe_tests.LENGTHS[0]  # both texts have a test of this length
ON_TEXT = {
    "MDN text": f"GPT with 23 M parameters on MDN text, {LENGTH[1]} steps of {LENGTH[0]:,} tokens",
    ".NET text": "the same on .NET text, not used to choose the defaults",
}
ON_IMAGES = {
    CIFAR10[1]: "ResNet-9 on CIFAR-10, 144 steps of 8,192 images",
    CIFAR100[1]: "the same on CIFAR-100",
}
IMAGE_SEEDS = {OURS: RECIPE_SEEDS[1], "Muon": RECIPE_SEEDS[1], "AdamW": RECIPE_SEEDS[0]}


def format_recipe(folder: Path = RESULTS) -> str:
    """Loss in nats per token, and accuracy in percent."""
    rows = []
    for text, label in ON_TEXT.items():
        losses = average_losses(Ledger(folder / recipe_tests.TEXTS[text], RunKey))
        ours, *peers = (f"{loss:.3f}" for loss in losses)
        rows.append((label, f"**{ours}** nats", *peers))
    for name, label in ON_IMAGES.items():
        ledger = ContestLedger(folder / name)
        averages = (average_accuracy(ledger, entrant) for entrant in IMAGE_SEEDS)
        ours, *peers = (f"{accuracy:.2f}" for accuracy in averages)
        rows.append((label, f"**{ours}** %", *peers))
    return format_table(HEADS, "lrrr", rows)


def average_losses(ledger: Ledger[RunKey]) -> list[float]:
    """Of the recipe and its peers, each over the seeds of its last test."""
    seeds = {recipe_tests.OURS: recipe_tests.SEEDS[recipe_tests.MUON], **recipe_tests.SEEDS}
    found = (recipe_tests.find_tested(ledger, arm, LENGTH, seeds[arm]) for arm in seeds)
    return [statistics.fmean(losses.values()) for losses in found]


def average_accuracy(ledger: ContestLedger, entrant: str) -> float:
    """The mean over the seeds of the entrant's last test, in percent."""
    return statistics.fmean(
        read_accuracy(run)
        for key, run in ledger.runs.items()
        if (key.stage, key.entrant) == ("final", entrant) and key.seed in IMAGE_SEEDS[entrant]
    )
