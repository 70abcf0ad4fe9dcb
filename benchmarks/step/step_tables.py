"""Tables of step times: those that scripts print, and shorter ones for docs/cost.md."""

import statistics
from typing import Any

from benchmarks.common.markdown import format_cell, format_table
from benchmarks.step.networks import NETWORKS
from benchmarks.step.peers import REFERENCE
from benchmarks.step.shapes import CASES

Rows = list[dict[str, Any]]
ADAMW, OURS = "AdamW fused", "Neumann fused"
ON_GPU = {
    "Neumann": OURS,
    "bfloat16 state": f"{OURS}, bf16 state",
    "no forces": f"{OURS}, no forces",
}
ON_CPU = {"Neumann": OURS, "no forces": f"{OURS}, no forces", "foreach": "Neumann foreach"}
PLAIN = "Neumann, P = I"
COMPARED = {  # with P = I, in the table of training steps
    "diagonal": "Neumann, diagonal",
    "spectral": "Neumann, spectral",
    "spectral, capturable": "Neumann, spectral, capturable",
    "step in your graph": "Neumann, spectral, in a graph",
    "fused AdamW": "AdamW, fused",
}
SQUARES = ["1x2048x2048", "4x2048x2048", "16x2048x2048", "1x4096x4096", "4x4096x4096"]


def shorten_error(error: str) -> str:
    """Its first sentence."""
    return error.partition(". ")[0]


def format_peers(rows: list[dict[str, Any]]) -> str:
    """All cases as one table, with ratios of medians to torch's Muon."""
    heads = ["network", "optimizer", "wall ms [quartiles]", "×", "gpu ms [quartiles]", "×"]
    heads += ["state B/weight", "graph GB", "peak GB"]
    reference = {row["case"]: row for row in rows if row["name"] == REFERENCE}
    cells = []
    for row in rows:
        cells.append([NETWORKS[row["case"]].title, row["name"]])
        if "error" in row:
            cells[-1].append(shorten_error(row["error"]))
            continue
        for clock in ("wall", "gpu"):
            found = row[f"{clock}_quartiles_ms"]
            other = reference.get(row["case"], {}).get(f"{clock}_quartiles_ms")
            shown = "{1:.2f} [{0:.2f}, {2:.2f}]".format(*found) if found else ""
            ratio = found[1] / other[1] if found and other else None
            cells[-1] += [shown, format_cell(ratio, "{:.2f}")]
        cells[-1].append(f"{row['state_bytes'] / row['weights']:.2f}")
        cells[-1].append(format_cell(row["graph_bytes"] / 1e9 or None, "{:.2f}"))
        peak = row["peak_bytes"]
        cells[-1].append(format_cell(None if peak is None else peak / 1e9, "{:.2f}"))
    return format_table(heads, "llrrrrrrr", cells)


def format_shares(rows: list[dict[str, Any]]) -> str:
    """The parts of a training step, and the share of P beside the step that it belongs to."""
    heads = ["part of a training step", "wall ms [quartiles]", "P's share, %"]
    heads += ["gpu ms [quartiles]", "P's share, %"]
    cells = []
    for row in rows:
        cells.append([row["part"]])
        if "error" in row:
            cells[-1].append(shorten_error(row["error"]))
            continue
        for clock in ("wall", "gpu"):
            for found, factor in ((f"{clock}_quartiles_ms", 1), (f"{clock}_share_quartiles", 100)):
                values = [factor * value for value in row[found] or []]
                cells[-1].append("{1:.2f} [{0:.2f}, {2:.2f}]".format(*values) if values else "")
    return format_table(heads, "lrrrr", cells)


def format_steps(rows: Rows, *, on_gpu: bool) -> str:
    """Steps by those of fused AdamW: by the device's clock, with the wall clock in brackets."""
    columns = ON_GPU if on_gpu else ON_CPU
    by_name = {(row["case"], row["name"]): row for row in rows if "error" not in row}
    cells = []
    for case in dict.fromkeys(row["case"] for row in rows):
        found = {name: by_name[case, name] for name in (ADAMW, *columns.values())}
        adamw = found[ADAMW]
        cells.append([_describe_case(case)])
        if on_gpu:
            cells[-1].append(f"{adamw['gpu_ms']:.3f} ({adamw['wall_ms']:.2f})")
        else:
            cells[-1].append(f"{adamw['wall_ms']:.1f}")
        for name in columns.values():
            wall = found[name]["wall_ms"] / adamw["wall_ms"]
            device = found[name]["gpu_ms"] / adamw["gpu_ms"] if on_gpu else None
            cells[-1].append(f"{device:.2f} × ({wall:.2f})" if on_gpu else f"{wall:.2f} ×")
        if on_gpu:
            speeds = [
                row["bytes_moved"] / row["gpu_ms"]
                for row in (found[OURS], by_name[case, "plain copy"])
            ]
            cells[-1].append(f"{100 * speeds[0] / speeds[1]:.0f} %")
    heads = ["", "AdamW fused, ms", *columns, *(["of copy bandwidth"] if on_gpu else [])]
    return format_table(heads, "l" + "r" * (len(heads) - 1), cells)


def _describe_case(case: str) -> str:
    title = CASES[case].title.replace("2^27", "2²⁷")
    return title if "tensor" in title else f"{title}, {len(CASES[case].shapes)} tensors"


def format_training_steps(cases: dict[str, Any]) -> str:
    """Whole training steps by those with P = I."""
    shown = {
        head: name
        for head, name in COMPARED.items()
        if any(name in case["ratios"] for case in cases.values())
    }
    cells = []
    for title, case in cases.items():
        plain = 1e3 * statistics.median(case["seconds"][PLAIN])
        ratios = [case["ratios"].get(name) for name in shown.values()]
        cells.append([title, f"{plain:.1f}", *(format_cell(r, "{:.3f} ×") for r in ratios)])
    return format_table(["", "P = I, ms", *shown], "lr" + "r" * len(shown), cells)


def format_symmetric(rows: Rows) -> str:
    """How much faster than torch.bmm the symmetric product is, for large squares."""
    by_name = {(r["size"], r["kind"]): r for r in rows if r["variant"] == "symmetric"}
    cells = []
    for size in SQUARES:
        batch, side, _ = size.split("x")
        cells.append([f"{batch} × {int(side):,}²"])
        for kind in ("gram", "polynomial"):
            row = by_name[size, kind]
            spread = row.get("speedup_quartiles")  # older files have none
            shown = f"{row['speedup']:.2f} ×"
            cells[-1].append(shown + (" [{0:.2f}, {2:.2f}]".format(*spread) if spread else ""))
    return format_table(["matrices", "XXᵀ", "bA + cA²"], "lrr", cells)
