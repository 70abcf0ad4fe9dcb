"""The roles of a model as a text table, and the tables that are committed.

After a change that is meant to change them, write them again and read the difference:

    WRITE_ROLES=1 python -m pytest tests/optim/roles tests/integrations/test_roles.py
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from neumann.optim.roles import Assignment

TABLES = Path(__file__).parent.parent / "data" / "roles"


def check_table(name: str, found: Iterable[Assignment]) -> None:
    """Compare roles with the committed table of a model; write it instead if the user asks."""
    path, table = TABLES / f"{name}.txt", format_roles(found)
    if os.environ.get("WRITE_ROLES"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(table)
    assert table.splitlines() == path.read_text().splitlines()


def format_roles(found: Iterable[Assignment]) -> str:
    """A line for each parameter: role, name, shape, and the view in words.

    Layers that differ in their numbers alone share a line if all have the same role and view. A
    star stands for the numbers, and for the dimensions that differ.
    """
    patterns: dict[str, list[Assignment]] = {}
    for one in found:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", one.name)
        patterns.setdefault(pattern, []).append(one)
    rows = [("role", "name", "shape", "view")]
    for pattern, layers in patterns.items():
        same = len({(one.role, one.view, one.parameter.ndim) for one in layers}) == 1
        if same and len(layers) > 1:
            rows.append(_row(f"{pattern} ({len(layers)})", layers))
        else:
            rows += [_row(one.name, [one]) for one in layers]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines) + "\n"


def _row(name: str, layers: list[Assignment]) -> tuple[str, str, str, str]:
    dimensions = zip(*(one.parameter.shape for one in layers), strict=True)
    sizes = (str(sizes[0]) if len(set(sizes)) == 1 else "*" for sizes in dimensions)
    return layers[0].role, name, "×".join(sizes) or "scalar", str(layers[0].view)
