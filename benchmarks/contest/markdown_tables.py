"""The contest as Markdown: a table per batch size, tables of all, and one of everything tested.

`corrected` holds p of every comparison on the test set, from `image_families`.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.common.markdown import format_cell, format_difference, format_table
from benchmarks.contest.entrants import ContestLedger
from benchmarks.contest.image_families import Comparison, Family
from benchmarks.contest.recipe_runs import OURS as RECIPE
from benchmarks.contest.summary import (
    BatchSummary,
    EntrantRow,
    average,
    find_tested,
    scores_by_seed,
)
from neumann.lab.studies.statistics import mean_interval

HEADS = ["optimizer", "lr, decay, momentum", "held out, %", "tested, %", "n", "vs. best peer"]
HEADS += ["p (Holm)", "running statistics, %", "s per run", "lr within a point"]
ALIGN = "llrrrrrrrl"
# With these, a table is wider than a page. Pages show them in tables and sentences of their own.
NOT_ON_PAGES = frozenset(HEADS[-3:])
MODELS = {"resnet9": "", "resnet18": "ResNet-18, "}  # how a column names them

Corrected = Mapping[Comparison, float]


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


def format_summaries(
    found: Mapping[str, Sequence[BatchSummary]], corrected: Corrected | None = None
) -> str:
    """The tables of all models and batch sizes, without p if it is not given."""
    return "\n\n".join(
        f"{summary['model']}, batch {summary['batch']}; "
        f"best peer, held out: {summary['best_peer']}\n\n{format_summary(summary, corrected)}"
        for summaries in found.values()
        for summary in summaries
        if summary["rows"]
    )


def format_summary(
    summary: BatchSummary, corrected: Corrected | None = None, leave_out: Container[str] = ()
) -> str:
    """One batch size, best first, without empty columns and those that are to be left out."""
    ranked = sorted(summary["rows"], key=_rank, reverse=True)
    cells = [_format_row(row, _find_p(summary, row, corrected)) for row in ranked]
    columns = list(zip(HEADS, ALIGN, *cells, strict=True))
    shown = (c for c in columns if any(c[2:]) and c[0] not in leave_out)
    heads, align, *lines = zip(*shown, strict=True)
    return format_table(heads, "".join(align), lines)


def format_overview(summaries: Sequence[BatchSummary]) -> str:
    """The accuracies at all batch sizes in one table."""
    tested = [s for s in summaries if any(row["scores"] for row in s["rows"])]
    steps = [max(row["steps"] or 0 for row in s["rows"]) for s in tested]
    heads = [f"batch {s['batch']}, {n} steps" for s, n in zip(tested, steps, strict=True)]
    by_name = [{_format_name(row): row for row in s["rows"]} for s in tested]
    ranked = _rank_names(tested)
    lines = [[name, *(_format_tested_cell(rows.get(name)) for rows in by_name)] for name in ranked]
    return format_table(["test accuracy, %", *heads], "l" + "r" * len(heads), lines)


def format_by_batch(
    found: Mapping[str, Sequence[BatchSummary]], field: str, form: str, title: str
) -> str:
    """A field of the rows at all batch sizes where it is known, in the order of the overview."""
    columns = {}
    for model, summaries in found.items():
        for summary in summaries:
            known = {_format_name(row): row[field] for row in summary["rows"] if row[field]}
            if known:
                columns[f"{MODELS[model]}batch {summary['batch']}"] = known
    ranked = _rank_names([summary for summaries in found.values() for summary in summaries])
    lines = [
        [name, *(format_cell(known.get(name), form) for known in columns.values())]
        for name in ranked
    ]
    return format_table([title, *columns], "l" + "r" * len(columns), lines)


def format_pairs(
    summaries: Sequence[BatchSummary], pairs: Mapping[str, str], family: Family
) -> str:
    """The lead of each optimizer over another at all batch sizes, paired by seed."""
    corrected = family.correct()

    def format_lead(summary: BatchSummary, ours: str, rival: str) -> str:
        tested = {row["entrant"] for row in summary["rows"] if row["scores"]}
        if not {ours, rival} <= tested:
            return ""
        found = Comparison(find_tested(summary, ours), find_tested(summary, rival))
        lead = family.leads[found]
        difference = format_difference(lead.mean, lead.low, lead.high)
        return f"{difference}, p = {corrected[found]:.2g}"

    heads = ["batch", *(f"{ours} over {rival}, points" for ours, rival in pairs.items())]
    lines = [
        [str(s["batch"]), *(format_lead(s, *pair) for pair in pairs.items())] for s in summaries
    ]
    return format_table(heads, "r" * len(heads), lines)


def format_families(
    found: Mapping[str, Sequence[BatchSummary]], families: Mapping[str, Family]
) -> str:
    """How many comparisons have touched each test set."""
    chosen = {
        find_tested(summary, row["entrant"])
        for summaries in found.values()
        for summary in summaries
        for row in summary["rows"]
    }
    rows = []
    for name, family in families.items():
        recipe = sum(each.ours.entrant == RECIPE for each in family.leads)
        shown = sum(chosen.issuperset(each) for each in family.leads)
        others = len(family.leads) - shown - recipe
        counts = shown, others, recipe, family.to_come, len(family)
        rows.append((name, *map(str, counts)))
    heads = ["test set", "settings of the tables", "superseded settings", "the untuned recipe"]
    return format_table([*heads, "still to come", "all"], "lrrrrr", rows)


def _find_p(summary: BatchSummary, row: EntrantRow, corrected: Corrected | None) -> float | None:
    """The corrected p of the difference to the best peer."""
    if corrected is None or (row["difference"] or {}).get("p") is None:
        return None
    ours, peer = (find_tested(summary, name) for name in (row["entrant"], summary["best_peer"]))
    return corrected[Comparison(ours, peer)]


def _format_row(row: EntrantRow, p: float | None) -> list[str]:
    interval, difference, lrs = row["interval"], row["difference"] or {}, row["range"]
    return [
        _format_name(row),
        _format_setting(row["setting"]),
        f"{row['held_out']:.2f}",
        _format_interval(interval),
        str(interval["n"]) + (f" ({interval['diverged']} ✗)" if interval["diverged"] else ""),
        format_difference(difference.get("mean"), difference.get("low"), difference.get("high")),
        format_cell(p, "{:.2g}"),
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


def _rank_names(summaries: Sequence[BatchSummary]) -> list[str]:
    """The tested, best first at the largest batch at which they were tested."""
    ranked: dict[str, None] = {}
    for summary in sorted(summaries, key=lambda summary: -summary["batch"]):
        tested = {_format_name(row): row["interval"]["mean"] for row in summary["rows"]}
        best_first = sorted(tested, key=lambda name: -(tested[name] or 0.0))
        ranked |= dict.fromkeys(name for name in best_first if tested[name] is not None)
    return list(ranked)


def _rank(row: EntrantRow) -> float:
    mean = row["interval"]["mean"]
    return float(row["held_out"] if mean is None else mean)
