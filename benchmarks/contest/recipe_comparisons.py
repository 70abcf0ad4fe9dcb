"""Every comparison of the untuned recipe with a tuned peer that has touched a test set.

    python -m benchmarks.contest.recipe_comparisons

Text and images, the published tests and the earlier ones, read from the ledgers of
`benchmarks.language.recipe_untuned` and `recipe_images`. p is corrected by Holm's method over all
of them.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.jobs import require_results
from benchmarks.common.ledger import Ledger
from benchmarks.common.markdown import format_cell, format_difference, format_table
from benchmarks.contest.entrants import ContestLedger, read_accuracy
from benchmarks.contest.recipe_runs import OURS, PEERS
from benchmarks.language import recipe_tests
from benchmarks.language.language_runs import RunKey
from neumann.lab.studies.statistics import (
    Difference,
    correct_by_holm,
    paired_difference,
    select_common_seeds,
)

RESULTS = Path("results")
TEXTS = {"MDN text": "language/recipe.jsonl", ".NET text": "language/recipe-dotnet.jsonl"}
IMAGES = {"CIFAR-10": "recipe-cifar10.jsonl", "CIFAR-100": "recipe-cifar100.jsonl"}
TEXT_SEEDS = range(1, 11), range(11, 21)  # of the first and the second test
IMAGE_SEEDS = range(10, 20), range(20, 30)


@dataclass(frozen=True)
class Comparison:
    """The recipe beside a peer in one test."""

    task: str
    test: int  # the first or the second
    peer: str
    lead: Difference  # nats or points: positive if the recipe leads


def list_comparisons(folder: Path = RESULTS) -> list[Comparison]:
    """All of them, in the order of the ledgers."""
    return [*_compare_on_text(folder), *_compare_on_images(folder)]


def _compare_on_text(folder: Path) -> Iterator[Comparison]:
    for text, name in TEXTS.items():
        ledger = Ledger(folder / name, RunKey)
        for length in recipe_tests.LENGTHS:
            task = f"{text}, {length[1]} steps"
            for test, seeds in enumerate(TEXT_SEEDS, start=1):
                ours = recipe_tests.find_tested(ledger, recipe_tests.OURS, length, seeds)
                for peer in recipe_tests.PEERS:
                    theirs = recipe_tests.find_tested(ledger, peer, length, seeds)
                    if theirs:
                        yield Comparison(task, test, peer, _find_lead(theirs, ours))


def _compare_on_images(folder: Path) -> Iterator[Comparison]:
    for task, name in IMAGES.items():
        errors: dict[str, dict[int, float]] = {}
        for key, run in ContestLedger(folder / name).runs.items():
            if key.stage == "final":
                errors.setdefault(key.entrant, {})[key.seed] = 100 - read_accuracy(run)
        for test, seeds in enumerate(IMAGE_SEEDS, start=1):
            for peer in PEERS:
                theirs = {seed: errors[peer][seed] for seed in seeds if seed in errors[peer]}
                if theirs:
                    lead = _find_lead(theirs, errors[OURS])
                    yield Comparison(task, test, peer, lead)


def _find_lead(theirs: Mapping[int, float], ours: Mapping[int, float]) -> Difference:
    return paired_difference(*select_common_seeds(theirs, ours))


def format_comparisons(found: list[Comparison]) -> str:
    p_values = correct_by_holm([1.0 if c.lead.p is None else c.lead.p for c in found])
    rows = [
        (
            c.task,
            ("first", "second")[c.test - 1],
            c.peer,
            str(c.lead.n),
            format_difference(c.lead.mean, c.lead.low, c.lead.high, 2 if "CIFAR" in c.task else 4),
            format_cell(c.lead.p, "{:.2g}"),
            f"{p:.2g}",
        )
        for c, p in zip(found, p_values, strict=True)
    ]
    heads = ("task", "test", "peer", "n", "lead of the recipe", "p", "p (Holm)")
    return f"{len(found)} comparisons\n" + format_table(heads, "lllrrrr", rows)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.parse_args()
    for name in (*TEXTS.values(), *IMAGES.values()):
        require_results(parser, RESULTS / name)
    print(format_comparisons(list_comparisons()))


if __name__ == "__main__":
    main()
