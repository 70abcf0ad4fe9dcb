"""What `neumann spectrum` prints: the ends with their errors, μ and η, and what they are of."""

import math
from typing import Any

from rich.table import Table

OPERATORS = {
    "hessian": "Hessian",
    "hessian by differences": "Hessian by differences of gradients",
    "gauss-newton": "Gauss–Newton matrix",
}

NOISY = 7 / 8  # share of the tolerance from which a run stops because of the noise


def ends_table(record: dict[str, Any]) -> Table:
    """λ_min and λ_max, and of the density's runs trace and Frobenius norm."""
    made = Table(box=None, pad_edge=False)
    made.add_column("", no_wrap=True)
    for title in ("value", "± at most"):
        made.add_column(title, justify="right", no_wrap=True)
    made.add_column("", no_wrap=True)
    for name, end in (("λ min", "smallest"), ("λ max", "largest")):
        found = record["extremes"][end]
        word = "converged" if found["converged"] else "not converged"
        made.add_row(name, number(found["value"]), f"{found['error']:.2g}", word)
    density = record["density"]
    if density is not None:
        interval = f"{100 * density['confidence']:g} % interval over {density['probes']} probes"
        for name in ("trace", "frobenius"):
            found = density[name]
            half = (found["upper"] - found["lower"]) / 2
            made.add_row(name.capitalize(), number(found["value"]), f"{half:.2g}", interval)
    return made


def coefficients_table(record: dict[str, Any]) -> Table:
    """The paper's μ and η, and what they make of the spectrum."""
    made = Table(box=None, pad_edge=False)
    made.add_column("", no_wrap=True)
    for title in ("of the values", "of the outer bounds"):
        made.add_column(title, justify="right", no_wrap=True)
    kinds = [record["coefficients"][name] for name in ("values", "outside")]
    rows = (
        ("μ = λmax/(|λmin| + λmax)", "momentum"),
        ("η = 1/λmax", "lr"),
        ("B̂ = (1−μ)I + μηH, from", "lowest"),
        ("to", "highest"),
    )
    for title, name in rows:
        made.add_row(title, *("–" if kind is None else number(kind[name]) for kind in kinds))
    return made


def sentences(record: dict[str, Any]) -> list[str]:
    """What was measured, on what, and how far it can be trusted."""
    about, found, source = record["about"], record["extremes"], record["source"]
    parts = [
        f"{OPERATORS.get(about['matrix'], about['matrix'])} of {about['parameters']:,} parameters",
        f"mean loss of {about['examples']:,} examples",
        f"{about['dtype']} on {about['device']}",
    ]
    if about["batchnorm"]:
        parts.append(
            {"batch": "BatchNorm over the batch"}.get(about["batchnorm"], "BatchNorm running")
        )
    if about["randomness"]:
        parts.append(about["randomness"])
    decay = about["weight_decay"]
    parts.append(f"weight decay {decay:g} included" if decay else "weight decay not included")
    if "checkpoint" in source:
        parts.append(f"{source['weights']} weights of step {source['step']:,}")
    made = [
        "; ".join(parts) + ".",
        f"Products: {found['products']}; noise {found['noise']:.2g}; each error holds but for a "
        f"chance of {found['risk']:g}, for the loss as it is computed in {about['dtype']}.",
    ]
    return made + _not_converged(found)


def _not_converged(found: dict[str, Any]) -> list[str]:
    """What would help where an end has not converged; [] where both have."""
    open_ends = [end for end in (found["smallest"], found["largest"]) if not end["converged"]]
    if not open_ends:
        return []
    tolerance, noise = min(end["tolerance"] for end in open_ends), found["noise"]
    if tolerance == 0:
        return ["Nothing to converge to was asked for: all of --max-products were spent."]
    if noise > NOISY * tolerance:
        return [
            f"Not converged: the errors hold all the same. The noise of the products, {noise:.2g}, "
            f"leaves no room in the tolerance, {tolerance:.2g}, and more products do not help; a "
            "larger --tolerance, another --operator or a model in float64 does."
        ]
    return ["Not converged: the errors hold all the same; a larger --max-products helps."]


def number(value: float) -> str:
    """Six digits; the sign of a negative one is a minus."""
    text = "∞" if value == math.inf else f"{value:.6g}"
    return text.replace("-", "−") if "e" not in text else text
