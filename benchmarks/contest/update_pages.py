"""Write the contest's tables into the docs, from the JSON of `large_batch table` and all runs.

    python -m benchmarks.contest.update_pages

A table stands between <!-- contest NAME --> and <!-- end of contest -->, where NAME is `overview`,
`forms` (the same for a few optimizers), `pairs` (a form beside its rival), `families` (how many
comparisons p is corrected for), `statistics` (accuracy with the running statistics of training),
`seconds` (time of a run), `cifar100` (the same settings on CIFAR-100), a batch size, or a model and
a batch size. The site's start page has `recipe` (the recipe beside its peers), README has `guide`
(the table of forms). The rest of a page does not change.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.ablations.other_data_table import format_scores
from benchmarks.common.pages import fill_parts
from benchmarks.contest.entrants import ContestLedger
from benchmarks.contest.form_guide import format_guide
from benchmarks.contest.image_families import (
    BEST_PEER,
    CIFAR10,
    CIFAR100,
    OTHER_FORMS,
    SPECTRAL,
    Family,
    load_families,
)
from benchmarks.contest.markdown_tables import (
    NOT_ON_PAGES,
    format_by_batch,
    format_families,
    format_overview,
    format_pairs,
    format_summary,
)
from benchmarks.contest.recipe_overview import format_recipe
from benchmarks.contest.summary import BatchSummary

ROOT = Path(__file__).parents[2]
SUMMARY = ROOT / "results/large-batch.json"
README = ROOT / "README.md"
PAGES = (ROOT / "docs/contests.md", ROOT / "docs/choosing-a-form.md", ROOT / "docs/index.md")
# Each form of this package, and the optimizer to compare it with. The first pair is in all tables.
FORMS = {SPECTRAL: BEST_PEER, **OTHER_FORMS}
KIND = "contest"  # of parts of a page


def fill_page(
    page: str, found: Mapping[str, Sequence[BatchSummary]], families: Mapping[str, Family]
) -> str:
    """The page with its tables up to date."""
    compared = {*FORMS, *FORMS.values()}
    forms: list[BatchSummary] = [
        {**summary, "rows": [row for row in summary["rows"] if row["entrant"] in compared]}
        for summary in found["resnet9"]
    ]
    on_cifar100 = ContestLedger(ROOT / "results" / CIFAR100[0])
    tables = {
        "overview": format_overview(found["resnet9"]),
        "forms": format_overview(forms),
        "pairs": format_pairs(found["resnet9"], OTHER_FORMS, families["CIFAR-10"]),
        "recipe": format_recipe(ROOT / "results"),
        "families": format_families(found, families),
        "statistics": format_by_batch(
            found, "with_training_statistics", "{:.2f}", "running statistics, %"
        ),
        "seconds": format_by_batch(found, "seconds", "{:.1f}", "seconds per run"),
        "cifar100": format_scores(on_cifar100, families["CIFAR-100"], unchanged=True),
    }
    corrected = families["CIFAR-10"].correct()
    for model, summaries in found.items():
        for summary in summaries:
            prefix = "" if model == "resnet9" else f"{model} "
            tables[f"{prefix}{summary['batch']}"] = format_summary(summary, corrected, NOT_ON_PAGES)
    return fill_parts(page, KIND, tables)


def fill_readme(
    page: str, found: Mapping[str, Sequence[BatchSummary]], families: Mapping[str, Family]
) -> str:
    """README with its table of forms up to date."""
    recipe = ContestLedger(ROOT / "results" / CIFAR10[1])
    guide = format_guide(found["resnet9"], recipe, families["CIFAR-10"])
    return fill_parts(page, KIND, {"guide": guide})


def main() -> None:
    found, families = json.loads(SUMMARY.read_text()), load_families(ROOT / "results")
    for path in PAGES:
        path.write_text(fill_page(path.read_text(), found, families))
    README.write_text(fill_readme(README.read_text(), found, families))


if __name__ == "__main__":
    main()
