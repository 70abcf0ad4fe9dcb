"""The contest as Markdown: a table for each batch size, one of all, one of everything tested."""

from dataclasses import asdict, replace
from typing import Any

from contest_summary import mean_over, scores_of
from ledger import Ledger
from markdown_cells import cell, difference, line

from neumann.lab.statistics import mean_interval


def everything_tested(ledger: Ledger) -> str:
    """Every setting that has met the test set, chosen or not: an open contest changes its mind."""
    places = {replace(key, seed=0) for key in ledger.runs if key.stage == "final"}
    heads = ["model", "batch", "optimizer", "lr, decay, momentum", "tested, %", "n"]
    heads += ["training's statistics", "training loss"]
    lines = [heads, ["---", "--:", "---", "---", "--:", "--:", "--:", "--:"]]
    for key in sorted(places, key=lambda key: (key.model, key.batch, key.entrant, str(key))):
        runs = ledger.seeds(key)
        interval = asdict(mean_interval(list(scores_of(runs).values())))
        lines.append(
            [
                key.model,
                str(key.batch),
                key.entrant,
                _setting(asdict(key.setting)),
                _mean_and_half(interval),
                str(len(runs)),
                cell(mean_over(runs, "accuracy"), "{:.2f}"),
                cell(mean_over(runs, "train_loss"), "{:.3f}"),
            ]
        )
    return "\n".join(map(line, lines))


def written(found: dict[str, list[dict[str, Any]]]) -> str:
    """As Markdown."""
    return "\n\n".join(
        f"{part['model']}, batch {part['batch']}; best peer, held out: {part['best_peer']}\n\n"
        + table(part)
        for parts in found.values()
        for part in parts
        if part["rows"]
    )


def table(part: dict[str, Any]) -> str:
    """One batch size as Markdown, without the columns that nobody has anything in."""
    heads = [
        ("optimizer", "---"),
        ("lr, decay, momentum", "---"),
        ("held out, %", "--:"),
        ("tested, %", "--:"),
        ("n", "--:"),
        ("to the best peer", "--:"),
        ("p", "--:"),
        ("training's statistics, %", "--:"),
        ("steps to 90 %", "--:"),
        ("s a run", "--:"),
        ("lr within a point", "---"),
    ]
    rows = [_cells(row) for row in sorted(part["rows"], key=_rank, reverse=True)]
    kept = [i for i in range(len(heads)) if any(cells[i] for cells in rows)]
    lines = [[head for head, _ in heads], [rule for _, rule in heads], *rows]
    return "\n".join(line([cells[i] for i in kept]) for cells in lines)


def _cells(row: dict[str, Any]) -> list[str]:
    interval, d, width = row["interval"], row["difference"] or {}, row["range"]
    return [
        _name(row),
        _setting(row["setting"]),
        f"{row['held_out']:.2f}",
        _mean_and_half(interval),
        str(interval["n"]) + (f" ({interval['diverged']} ✗)" if interval["diverged"] else ""),
        difference(d.get("mean"), d.get("low"), d.get("high")),
        cell(d.get("p"), "{:.2g}"),
        cell(row["with_training_statistics"], "{:.2f}"),
        cell(row["steps_to_target"], "{:g}"),
        cell(row["seconds"], "{:.1f}"),
        ""
        if width is None
        else f"{width['low']:.3g} to {width['high']:.3g}, {width['octaves']:g} octaves",
    ]


def overview(parts: list[dict[str, Any]]) -> str:
    """All batch sizes as one table: accuracies, and the steps to 90 % in brackets."""
    tested = [part for part in parts if any(row["scores"] for row in part["rows"])]
    steps = [max(row["steps"] or 0 for row in part["rows"]) for part in tested]
    heads = [f"batch {p['batch']}, {n} steps" for p, n in zip(tested, steps, strict=True)]
    by_name = [{_name(row): row for row in part["rows"]} for part in tested]
    ranked: dict[str, None] = {}  # by the largest batch that both have been tested at
    for rows in reversed(by_name):
        best_first = sorted(rows, key=lambda own: -(rows[own]["interval"]["mean"] or 0.0))
        ranked |= dict.fromkeys(own for own in best_first if rows[own]["scores"])
    lines = [["test accuracy, %", *heads], ["---", *["--:"] * len(heads)]]
    for own in ranked:
        lines.append([own, *(_tested(rows.get(own)) for rows in by_name)])
    return "\n".join(map(line, lines))


def _tested(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return _mean_and_half(row["interval"]) + cell(row["steps_to_target"], " ({:g})")


def _name(row: dict[str, Any]) -> str:
    return f"**{row['entrant']}**" if row["ours"] else str(row["entrant"])


def _setting(setting: dict[str, float]) -> str:
    return f"{setting['lr']:.3g}, {setting['decay']:g}, {setting['momentum']:g}"


def _mean_and_half(interval: dict[str, Any]) -> str:
    half = None if interval["high"] is None else interval["high"] - interval["mean"]
    return cell(interval["mean"], "{:.2f}") + cell(half, " ± {:.2f}")


def _rank(row: dict[str, Any]) -> float:
    mean = row["interval"]["mean"]
    return float(row["held_out"] if mean is None else mean)
