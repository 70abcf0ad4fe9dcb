"""Write the tables of step times into docs/cost.md, from the files in results.

    python -m benchmarks.step.update_cost_page

What has no file says that it is not measured yet.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.pages import fill_parts
from benchmarks.step.step_tables import (
    format_peers,
    format_shares,
    format_steps,
    format_symmetric,
    format_training_steps,
)

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
PAGE = ROOT / "docs/cost.md"
KIND = "cost"  # of parts of the page
MISSING = "*Not measured yet.*"
PARTS: dict[str, tuple[str, Callable[[Any], str]]] = {  # the file, and its table
    "step-h200": ("step-h200", lambda found: format_steps(found["rows"], on_gpu=True)),
    "step-cpu": ("step-cpu", lambda found: format_steps(found["rows"], on_gpu=False)),
    "muons": ("muons-h200", lambda found: format_peers(found["rows"])),
    "training": ("preconditioning-h200", lambda found: format_training_steps(found["cases"])),
    "share": ("preconditioner-share-h200", lambda found: format_shares(found["rows"])),
    "symmetric": ("symmetric-product-h200", lambda found: format_symmetric(found["rows"])),
}


def make_part(name: str, folder: Path = RESULTS) -> str:
    """The table of a part and where its numbers come from."""
    stem, format_found = PARTS[name]
    path = folder / f"{stem}.json"
    if not path.exists():
        return MISSING
    found = json.loads(path.read_text())
    return f"{format_found(found)}\n\n{describe_source(path, found)}"


def describe_source(path: Path, found: dict[str, Any]) -> str:
    about = found.get("environment", found)  # files of 2026-11-15 have it beside the rows
    torch = about["versions"]["torch"]
    where = f"{about['hardware']}, torch {torch}, commit {about['commit'][:7]}, {about['date']}"
    return f"*{where} ([JSON](../results/{path.name})).*"


def main() -> None:
    parts = {name: make_part(name) for name in PARTS}
    PAGE.write_text(fill_parts(PAGE.read_text(), KIND, parts))


if __name__ == "__main__":
    main()
