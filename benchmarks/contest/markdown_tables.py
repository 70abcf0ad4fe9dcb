"""The contest as Markdown: a table per batch size, one of all, and one of everything tested."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.common.markdown import format_cell, format_difference, format_table
from benchmarks.contest.entrants import ContestLedger
from benchmarks.contest.summary import BatchSummary, EntrantRow, average, scores_by_seed
from neumann.lab.studies.statistics import (
    correct_by_holm,
    mean_interval,
    paired_difference,
    select_common_seeds,
)

HEADS = ["optimizer", "lr, decay, momentum", "held out, %", "tested, %", "n", "vs. best peer"]
HEADS += ["p (Holm)", "running statistics, %", "s per run", "lr within a point"]
ALIGN = "llrrrrrrrl"


def format_tested(ledger: ContestLedger) -> str:
    """Every setting that was scored on the test set, whether it was chosen in the end or not."""
    keys = {replace(key, seed=0) for key in ledger.runs if key.stage == "final"}
    heads = ["model", "batch", "optimizer", "lr, decay, momentum", "tested, %", "n"]
    heads += ["running statistics", "training loss"]
    rows = []
    for key in sorted(keys, key=lambda key: (key.model, key.batch, key.entrant, str(key))):
        runs = ledger.find_seeds(key)
        interval = asdict(mean_interval(list(scores_by_seed(runs).values())))
        row = [key.model, str(key.batch), key.entrant, _format_setting(asdict(key.setting))]
        row += [_format_interval(interval), str(len(runs))]
        row.append(format_cell(average(runs, "accuracy"), "{:.2f}"))
        row.append(format_cell(average(runs, "train_loss"), "{:.3f}"))
        rows.append(row)
    count = sum(key.stage == "final" for key in ledger.runs)
    return f"{format_table(heads, 'lrllrrrr', rows)}\n\n{len(rows)} settings, {count} runs"


def format_summaries(found: Mapping[str, Sequence[BatchSummary]]) -> str:
    """The tables of all models and batch sizes."""
    return "\n\n".join(
        f"{summary['model']}, batch {summary['batch']}; "
        f"best peer, held out: {summary['best_peer']}\n\n{format_summary(summary['rows'])}"
        for summaries in found.values()
        for summary in summaries
        if summary["rows"]
    )


def format_summary(rows: Sequence[EntrantRow]) -> str:
    """One batch size, best first, without empty columns."""
    cells = [_format_row(row) for row in sorted(rows, key=_rank, reverse=True)]
    columns = list(zip(HEADS, ALIGN, *cells, strict=True))
    heads, align, *lines = zip(*(c for c in columns if any(c[2:])), strict=True)
    return format_table(heads, "".join(align), lines)


def format_overview(summaries: Sequence[BatchSummary]) -> str:
    """The accuracies at all batch sizes in one table."""
    tested = [s for s in summaries if any(row["scores"] for row in s["rows"])]
    steps = [max(row["steps"] or 0 for row in s["rows"]) for s in tested]
    heads = [f"batch {s['batch']}, {n} steps" for s, n in zip(tested, steps, strict=True)]
    by_name = [{_format_name(row): row for row in s["rows"]} for s in tested]
    ranked: dict[str, None] = {}  # by the largest batch at which they were tested
    for rows in reversed(by_name):
        best_first = sorted(rows, key=lambda name: -(rows[name]["interval"]["mean"] or 0.0))
        ranked |= dict.fromkeys(name for name in best_first if rows[name]["scores"])
    lines = [[name, *(_format_tested_cell(rows.get(name)) for rows in by_name)] for name in ranked]
    return format_table(["test accuracy, %", *heads], "l" + "r" * len(heads), lines)


def format_pairs(summaries: Sequence[BatchSummary], pairs: Mapping[str, str]) -> str:
    """The lead of each optimizer over another at all batch sizes, paired by seed.

    p is corrected by Holm's method for all cells of the table.
    """
    scores = [{row["entrant"]: row["scores"] for row in s["rows"]} for s in summaries]
    found = {
        (ours, i): paired_difference(*select_common_seeds(tested[ours], tested[rival]))
        for ours, rival in pairs.items()
        for i, tested in enumerate(scores)
        if tested.get(ours) and tested.get(rival)
    }
    corrected = correct_by_holm([1.0 if each.p is None else each.p for each in found.values()])
    cells = {
        place: f"{format_difference(each.mean, each.low, each.high)}, p = {p:.2g}"
        for (place, each), p in zip(found.items(), corrected, strict=True)
    }
    heads = ["points of accuracy", *(f"batch {s['batch']}" for s in summaries)]
    lines = [
        [f"{ours} over {rival}", *(cells.get((ours, i), "") for i in range(len(scores)))]
        for ours, rival in pairs.items()
    ]
    return format_table(heads, "l" + "r" * len(scores), lines)


def _format_row(row: EntrantRow) -> list[str]:
    interval, difference, lrs = row["interval"], row["difference"] or {}, row["range"]
    return [
        _format_name(row),
        _format_setting(row["setting"]),
        f"{row['held_out']:.2f}",
        _format_interval(interval),
        str(interval["n"]) + (f" ({interval['diverged']} ✗)" if interval["diverged"] else ""),
        format_difference(difference.get("mean"), difference.get("low"), difference.get("high")),
        format_cell(difference.get("p_holm"), "{:.2g}"),
        format_cell(row["with_training_statistics"], "{:.2f}"),
        format_cell(row["seconds"], "{:.1f}"),
        "" if lrs is None else _format_range(lrs["low"], lrs["high"]),
    ]


def _format_range(low: float, high: float) -> str:
    return f"{low:.3g} to {high:.3g}, a factor of {high / low:.3g}"


def _format_tested_cell(row: EntrantRow | None) -> str:
    return "" if row is None else _format_interval(row["interval"])


def _format_name(row: EntrantRow) -> str:
    return f"**{row['entrant']}**" if row["ours"] else row["entrant"]


def _format_setting(setting: Mapping[str, float]) -> str:
    return f"{setting['lr']:.3g}, {setting['decay']:g}, {setting['momentum']:g}"


def _format_interval(interval: Mapping[str, Any]) -> str:
    half = None if interval["high"] is None else interval["high"] - interval["mean"]
    return format_cell(interval["mean"], "{:.2f}") + format_cell(half, " ± {:.2f}")


def _rank(row: EntrantRow) -> float:
    mean = row["interval"]["mean"]
    return float(row["held_out"] if mean is None else mean)
