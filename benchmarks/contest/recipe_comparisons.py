"""Every comparison of the untuned recipe with a tuned peer that has touched a test set.

    python -m benchmarks.contest.recipe_comparisons

Text and images, the published tests and the earlier ones, read from the ledgers of
`benchmarks.language.recipe_untuned` and `recipe_images`. p is corrected by Holm's method: on text
over all comparisons here, on images over every comparison on the same test set, also those of the
contest (`image_families`).
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.jobs import require_results
from benchmarks.common.ledger import Ledger
from benchmarks.common.markdown import format_cell, format_difference, format_table
from benchmarks.contest.image_families import (
    CIFAR10,
    CIFAR100,
    RECIPE_SEEDS,
    RESULTS,
    load_families,
)
from benchmarks.contest.recipe_runs import OURS
from benchmarks.language import recipe_tests
from benchmarks.language.language_runs import RunKey
from neumann.lab.studies.statistics import (
    Difference,
    correct_by_holm,
    paired_difference,
    select_common_seeds,
)

TEXT_SEEDS = range(1, 11), range(11, 21)  # of the first and the second test


@dataclass(frozen=True)
class Comparison:
    """The recipe beside a peer in one test."""

    task: str
    test: int  # the first or the second
    peer: str
    lead: Difference  # nats or points: positive if the recipe leads
    p: float  # corrected
    family: int  # for so many comparisons


def list_comparisons(folder: Path = RESULTS) -> list[Comparison]:
    """All of them, in the order of the ledgers."""
    return [*_compare_on_text(folder), *_compare_on_images(folder)]


def _compare_on_text(folder: Path) -> list[Comparison]:
    found = list(_find_leads_on_text(folder))
    corrected = correct_by_holm([1.0 if lead.p is None else lead.p for *_, lead in found])
    return [Comparison(*each, p, len(found)) for each, p in zip(found, corrected, strict=True)]


def _find_leads_on_text(folder: Path) -> Iterator[tuple[str, int, str, Difference]]:
    for text, name in recipe_tests.TEXTS.items():
        ledger = Ledger(folder / name, RunKey)
        for length in recipe_tests.LENGTHS:
            task = f"{text}, {length[1]} steps"
            for test, seeds in enumerate(TEXT_SEEDS, start=1):
                ours = recipe_tests.find_tested(ledger, recipe_tests.OURS, length, seeds)
                for peer in recipe_tests.PEERS:
                    theirs = recipe_tests.find_tested(ledger, peer, length, seeds)
                    if theirs:
                        lead = paired_difference(*select_common_seeds(theirs, ours))
                        yield task, test, peer, lead


def _compare_on_images(folder: Path) -> Iterator[Comparison]:
    first_seeds = [seeds.start for seeds in RECIPE_SEEDS]
    for task, family in load_families(folder).items():
        corrected = family.correct()
        for found, lead in family.leads.items():
            if found.ours.entrant == OURS:
                test = 1 + first_seeds.index(found.ours.seed)
                p = corrected[found]
                yield Comparison(task, test, found.rival.entrant, lead, p, len(family))


def format_comparisons(found: list[Comparison]) -> str:
    rows = [
        (
            c.task,
            ("first", "second")[c.test - 1],
            c.peer,
            str(c.lead.n),
            format_difference(c.lead.mean, c.lead.low, c.lead.high, 2 if "CIFAR" in c.task else 4),
            format_cell(c.lead.p, "{:.2g}"),
            f"{c.p:.2g}",
            str(c.family),
        )
        for c in found
    ]
    heads = ("task", "test", "peer", "n", "lead of the recipe", "p", "p (Holm)", "corrected for")
    return f"{len(found)} comparisons\n" + format_table(heads, "lllrrrrr", rows)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.parse_args()
    for name in (*recipe_tests.TEXTS.values(), *CIFAR10, *CIFAR100):
        require_results(parser, RESULTS / name)
    print(format_comparisons(list_comparisons()))


if __name__ == "__main__":
    main()
