"""The arms that a reader can choose to compare the others with: each of them, if they are few.

All pairs are tested when the page is written, and the page shows those with the chosen arm.
"""

from collections.abc import Sequence

from neumann.lab.studies.results import Comparison

MAX_REFERENCES = 12  # pairs grow with the square


def list_references(arms: Sequence[str]) -> list[str]:
    return list(arms) if len(arms) <= MAX_REFERENCES else list(arms[:1])


def compare_with_each(comparison: Comparison) -> list[Comparison]:
    """Return the comparison once for each reference; once before a run has finished."""
    if not any(row.runs for row in comparison.rows):
        return [comparison]
    references = list_references([row.arm for row in comparison.rows])
    return [comparison, *(comparison.compare_with(i) for i in range(1, len(references)))]
