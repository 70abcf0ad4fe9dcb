"""How long an optimizer step takes, beside torch's optimizers and a plain copy.

    python -m benchmarks.step.time_optimizers --device cpu --cases a d --output step-cpu.json
    python -m benchmarks.step.time_optimizers --before ../older/src

All optimizers run in one process, in rounds that visit them in a random order, so that ratios mean
something on a noisy machine. `wall` is the median time of step() with its Python, until the device
has finished. `gpu` is the time that the device is busy with it; launch latency does not count. An
optimizer that fails, for lack of memory for example, has a row that says why.

With --before, two versions of the library are measured instead: the imported one and the one in
the given source folder. See benchmarks/step/versions.py.
"""

import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common.markdown import format_cell, format_table
from benchmarks.common.script import create_parser, write_measurements
from benchmarks.step.candidates import all_candidates, select
from benchmarks.step.shapes import CASES, PUBLISHED
from benchmarks.step.timed_optimizer import TimedOptimizer, free_memory, time_in_rounds
from benchmarks.step.versions import compare_versions, format_ratios

REFERENCE = "AdamW fused"


def measure(
    case: str, device: torch.device, seconds: float, only: str | None
) -> list[dict[str, Any]]:
    """Visit all candidates in rounds until the time is up."""
    chosen = select(all_candidates(device), case, only)
    timed = []
    for number, candidate in enumerate(chosen, start=1):
        show_progress(f"{CASES[case].title}: building {number}/{len(chosen)} {candidate.name}")
        timed.append(TimedOptimizer(candidate, CASES[case].shapes, device))
        timed[-1].attempt(timed[-1].build)
    for rounds, passed in time_in_rounds(timed, seconds):
        show_progress(f"{CASES[case].title}: round {rounds}, {passed:.0f} s")
    rows = [make_row(case, entry) for entry in timed]
    timed.clear()
    free_memory(device)
    return rows


def make_row(case: str, timed: TimedOptimizer) -> dict[str, Any]:
    """One optimizer on one case, or why it was not measured; times are medians."""
    named = {"case": case, "name": timed.candidate.name}
    peak = None if timed.error else timed.attempt(timed.measure_peak_bytes)
    if timed.error:
        return {**named, "error": timed.error}
    walls = sorted(timed.wall_ms)
    moved = timed.candidate.bytes_per_weight
    return {
        **named,
        "wall_ms": median(walls),
        "wall_quartiles_ms": (walls[len(walls) // 4], walls[3 * len(walls) // 4]),
        "gpu_ms": median(timed.gpu_ms) if timed.gpu_ms else None,
        "bytes_moved": None if moved is None else moved * CASES[case].weights,
        "state_bytes": timed.count_state_bytes(),
        "peak_bytes": peak,  # beyond parameters, gradients and state
        "rounds": len(walls),
    }


def show_progress(text: str) -> None:
    before, end = ("\r\033[K", "") if sys.stderr.isatty() else ("", "\n")
    print(f"{before}{text}", end=end, file=sys.stderr, flush=True)


def format_rows(rows: list[dict[str, Any]]) -> str:
    """One case as Markdown, with ratios to fused AdamW and to the bandwidth of the plain copy."""
    by_name = {row["name"]: row for row in rows}
    reference, copy = by_name.get(REFERENCE, {}), by_name.get("plain copy", {})

    def ratio(value: float | None, other: float | None) -> float | None:
        return value / other if value and other else None

    def bandwidth(row: dict[str, Any]) -> float | None:
        return ratio(row.get("bytes_moved"), row.get("gpu_ms") or row.get("wall_ms"))

    heads = ["optimizer", "wall ms", "×", "gpu ms", "×", "GB moved", "of copy"]
    heads += ["state GB", "peak GB"]
    cells = []
    for row in rows:
        cells.append([row["name"]])
        if "error" in row:
            cells[-1].append(row["error"])
            continue
        for key in ("wall_ms", "gpu_ms"):
            cells[-1].append(format_cell(row[key], "{:.3f}"))
            cells[-1].append(format_cell(ratio(row[key], reference.get(key)), "{:.2f}"))
        moved, state, peak = (
            "" if row[key] is None else f"{row[key] / 1e9:.2f}"
            for key in ("bytes_moved", "state_bytes", "peak_bytes")
        )
        of_copy = format_cell(ratio(bandwidth(row), bandwidth(copy)), "{:.0%}")
        cells[-1] += [moved, of_copy.replace("%", " %"), state, peak]
    case = CASES[rows[0]["case"]]
    title = f"**({rows[0]['case']}) {case.title}**, {case.weights:,} weights"
    return f"{title}\n\n{format_table(heads, 'lrrrrrrrr', cells)}"


def main() -> None:
    parser = create_parser(__doc__, "cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=PUBLISHED)
    parser.add_argument("--seconds", type=float, default=20.0, help="time for the rounds of a case")
    parser.add_argument("--only", help="only optimizers whose name contains this")
    parser.add_argument("--before", type=Path, help="source folder of an older version")
    parser.add_argument("--steps", type=int, default=5, help="timed at each visit, with --before")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rows: list[dict[str, Any]] = []  # written again and again, in case of an interruption
    if arguments.before:
        given = arguments.before, arguments.seconds, arguments.steps, arguments.only
        for rows in compare_versions(arguments.cases, device, *given):
            write_measurements(arguments, device, before=str(arguments.before), rows=rows)
        print(format_ratios(rows))
        return
    for case in arguments.cases:
        found = measure(case, device, arguments.seconds, arguments.only)
        print(f"\n{format_rows(found)}\n", flush=True)
        rows += found
        write_measurements(arguments, device, rows=rows)


if __name__ == "__main__":
    main()
