"""The contest's tables in README and docs, written from what `large_batch.py table` has found.

    python benchmarks/contest_pages.py

A table stands between <!-- contest NAME --> and <!-- end of contest -->, where NAME is overview, a
batch size, or a model and a batch size. Nothing else of a page is touched.
"""

import json
import re
from pathlib import Path
from typing import Any

from contest_table import overview, table

ROOT = Path(__file__).parents[1]
FOUND = ROOT / "results/large-batch.json"
PAGES = (ROOT / "README.md", ROOT / "docs/preconditioning.md")
PLACE = re.compile(r"(<!-- contest (.+?) -->\n).*?(<!-- end of contest -->)", re.DOTALL)


def filled(page: str, found: dict[str, list[dict[str, Any]]]) -> str:
    """The page with its tables up to date."""
    tables = {"overview": overview(found["resnet9"])}
    for model, parts in found.items():
        for part in parts:
            prefix = "" if model == "resnet9" else f"{model} "
            tables[f"{prefix}{part['batch']}"] = table(part)

    def fill(place: re.Match[str]) -> str:
        before, name, after = place.groups()
        return f"{before}{tables[name]}\n{after}"

    return PLACE.sub(fill, page)


def main() -> None:
    found = json.loads(FOUND.read_text())
    for path in PAGES:
        path.write_text(filled(path.read_text(), found))


if __name__ == "__main__":
    main()
