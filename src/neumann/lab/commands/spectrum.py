"""`neumann spectrum`: measure the curvature of a loss, print it, and write the record."""

import math
from typing import Any

from rich.table import Table

from neumann.lab.commands.progress import show_products
from neumann.lab.commands.terminal import make_table, print_table
from neumann.lab.report.curvature_plots import MATRICES
from neumann.lab.studies.settings import SpectrumConfig
from neumann.lab.studies.spectrum_measurement import measure_spectrum
from neumann.lab.studies.study_files import write_object

NOISY = 7 / 8  # share of the tolerance above which noise stops a run


def run(config: SpectrumConfig) -> None:
    record = measure_spectrum(config, show_products)
    print_table(tabulate_ends(record), [""])
    print_table(tabulate_coefficients(record), ["", *describe_measurement(record)])
    write_object(config.file, record)
    print(f"record: {config.file}", flush=True)
    if config.density:
        from neumann.lab.report import write_density

        print(f"plot: {write_density(config.file)}")


def tabulate_ends(record: dict[str, Any]) -> Table:
    """λ_min and λ_max, and with a density the trace and the Frobenius norm."""
    table = make_table("", "value", "± at most", "")
    table.columns[3].justify = "left"
    for name, end in (("λ min", "smallest"), ("λ max", "largest")):
        found = record["extremes"][end]
        status = "converged" if found["converged"] else "not converged"
        table.add_row(name, format_number(found["value"]), f"{found['error']:.2g}", status)
    density = record["density"]
    if density is not None:
        interval = f"{100 * density['confidence']:g} % interval over {density['probes']} probes"
        for name in ("trace", "frobenius"):
            found = density[name]
            half = (found["upper"] - found["lower"]) / 2
            value = format_number(found["value"])
            table.add_row(name.capitalize(), value, f"{half:.2g}", interval)
    return table


def tabulate_coefficients(record: dict[str, Any]) -> Table:
    """The paper's μ and η, and the spectrum of B̂ that they give."""
    table = make_table("", "of the values", "of the outer bounds")
    kinds = [record["coefficients"][name] for name in ("values", "outside")]
    rows = (
        ("μ = λmax/(|λmin| + λmax)", "momentum"),
        ("η = 1/λmax", "lr"),
        ("B̂ = (1−μ)I + μηH, from", "lowest"),
        ("to", "highest"),
    )
    for title, name in rows:
        cells = ("–" if kind is None else format_number(kind[name]) for kind in kinds)
        table.add_row(title, *cells)
    return table


def describe_measurement(record: dict[str, Any]) -> list[str]:
    """Sentences about what was measured, on what, and how reliable it is."""
    about, ends, source = record["about"], record["extremes"], record["source"]
    matrix = MATRICES.get(about["matrix"], about["matrix"])
    parts = [
        f"{matrix} of {about['parameters']:,} parameters",
        f"mean loss of {about['examples']:,} examples",
        f"{about['dtype']} on {about['device']}",
    ]
    if about["batchnorm"]:
        over_batch = about["batchnorm"] == "batch"
        parts.append(f"BatchNorm with {'batch' if over_batch else 'running'} statistics")
    if about["randomness"]:
        parts.append(about["randomness"])
    decay = about["weight_decay"]
    parts.append(f"weight decay {decay:g} included" if decay else "weight decay not included")
    if "checkpoint" in source:
        parts.append(f"{source['weights']} weights of step {source['step']:,}")
    return [
        "; ".join(parts) + ".",
        f"Products: {ends['products']}; noise {ends['noise']:.2g}; each error bound fails with "
        f"probability at most {ends['risk']:g}, for the loss as computed in {about['dtype']}.",
        *_advise_convergence(ends),
    ]


def _advise_convergence(ends: dict[str, Any]) -> list[str]:
    """What would help an end that has not converged; nothing if both have."""
    unconverged = [end for end in (ends["smallest"], ends["largest"]) if not end["converged"]]
    if not unconverged:
        return []
    tolerance, noise = min(end["tolerance"] for end in unconverged), ends["noise"]
    if tolerance == 0:
        return ["A tolerance of 0 cannot be reached: all --max-products were spent."]
    if noise > NOISY * tolerance:
        return [
            f"Not converged, but the error bounds hold. The products' noise, {noise:.2g}, is too "
            f"large for the tolerance, {tolerance:.2g}. More products do not help; use a larger "
            "--tolerance, another --operator or a model in float64."
        ]
    return ["Not converged, but the error bounds hold; a larger --max-products helps."]


def format_number(value: float) -> str:
    """Six significant digits, with a proper minus sign."""
    text = "∞" if value == math.inf else f"{value:.6g}"
    return text.replace("-", "−") if "e" not in text else text
