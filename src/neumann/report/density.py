"""The density of eigenvalues that `neumann spectrum` has recorded, as a picture beside the record.

On a log axis, from a tenth of what a single eigenvalue would show up to the peak: below it there is
nothing but the tails of the curves that widen the nodes. UsageError where the record has no density
or nothing can be written; RecordsError where it is damaged.
"""

import math
from pathlib import Path
from typing import Any

from neumann.lab.errors import UsageError, missing_package
from neumann.lab.files import reason, write_aside
from neumann.lab.reading import read_object
from neumann.report.curves import Curve
from neumann.report.plots import Plot, Spot

NAMES = {"hessian": "Hessian", "gauss-newton": "Gauss–Newton matrix"}


def write_density(record: Path) -> Path:
    """Draw the density in a record of `neumann spectrum`; returns the PNG, named after it."""
    content = read_object(record)
    if not isinstance(content.get("density"), dict):
        raise UsageError(f"{record} holds no density: neumann spectrum --density measures one")
    try:
        from neumann.report.drawing import draw
    except ImportError as error:
        raise missing_package("matplotlib", "lab", "a plot") from error
    path = record.with_suffix(".png")
    try:
        write_aside(path, [draw(density_plot(content)).png])
    except OSError as error:
        raise UsageError(f"cannot write {path}: {reason(error)}") from error
    return path


def density_plot(record: dict[str, Any]) -> Plot:
    """What the picture shows."""
    density, about, extremes = record["density"], record["about"], record["extremes"]
    single = 1 / (about["parameters"] * density["width"] * math.sqrt(2 * math.pi))
    bottom = single / 10
    y, low, high = (
        tuple(max(value, bottom / 10) for value in density[name])
        for name in ("density", "lower", "upper")
    )
    matrix = NAMES.get(about["matrix"], str(about["matrix"]))
    label = (
        f"{about['parameters']:,} parameters, {about['examples']:,} examples; band: "
        f"{100 * density['confidence']:g} % over {density['probes']} probes"
    )
    ends = [extremes[name]["value"] for name in ("smallest", "largest")]
    return Plot(
        "density",
        f"Density of the {matrix}’s eigenvalues",
        "eigenvalue λ;  ○  λ min and λ max",
        "share of eigenvalues per unit of λ",
        (Curve(label, 0, "mean", tuple(density["points"]), y, low, high),),
        "",
        spots=tuple(Spot(label, 0, "chosen", value, None) for value in ends),
        log_y=True,
        from_zero=False,
        bottom=bottom,
    )
