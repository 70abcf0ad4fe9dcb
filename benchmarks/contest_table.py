"""What the contest has found so far: for each batch size the winners, tested, beside the best peer.

The best peer is the one of the others with the best held-out score, at full length if any was tuned
so. Differences to it are paired by seed. A run that diverged has no number; it is counted.
"""

import math
import statistics
from dataclasses import asdict, replace
from typing import Any

from contest import ENTRANTS, Search, Tuning
from ledger import Key, Ledger, Missing, accuracy

from neumann.lab.statistics import common_seeds, mean_interval, paired_difference

EPOCHS_OF_A_RUN = 24


def summary(ledger: Ledger, tuning: Tuning, model: str = "resnet9") -> dict[str, Any]:
    """The rows of one batch size, of those entrants whose search is over."""
    rows = []
    for entrant in ENTRANTS:
        try:
            chosen = tuning.chosen(entrant)
            if model != "resnet9":
                here = Search(entrant, tuning.batch, tuning.epochs, model)
                chosen = here.of(here.transferred(ledger.score, chosen.setting))
        except Missing:
            continue
        rows.append(_row(ledger, chosen, tuning.epochs))
    peers = [row for row in rows if not row["ours"]]
    best = max(peers, key=lambda row: (row["held_out_epochs"], row["held_out"]), default=None)
    for row in rows:
        row["difference"] = None if best is None or row is best else _difference(row, best)
    return {
        "model": model,
        "batch": tuning.batch,
        "best_peer": None if best is None else best["entrant"],
        "rows": rows,
    }


def _row(ledger: Ledger, chosen: Key, epochs: int) -> dict[str, Any]:
    setting = chosen.setting
    runs = ledger.seeds(replace(chosen, stage="final", epochs=EPOCHS_OF_A_RUN))
    scores = {seed: _score(run) for seed, run in runs.items()}
    reached = [run.get("steps_to_target") for run in runs.values()]
    return {
        "entrant": chosen.entrant,
        "ours": ENTRANTS[chosen.entrant].ours,
        "setting": asdict(setting),
        "held_out": ledger.score(chosen),  # %
        "held_out_epochs": chosen.epochs,
        "scores": scores,  # %, by seed
        "interval": asdict(mean_interval(list(scores.values()))),
        "with_training_statistics": _with_training_statistics(runs),  # %
        "steps": next((run.get("steps") for run in runs.values()), None),
        "steps_to_target": None if None in reached or not reached else statistics.median(reached),
        "seconds": _seconds(ledger, chosen),
        "range": _range(ledger, chosen, epochs),
    }


def _score(run: dict[str, Any]) -> float:
    return math.nan if "diverged" in run else accuracy(run)


def _with_training_statistics(runs: dict[int, Any]) -> float | None:
    return _mean([run["accuracy"] for run in runs.values() if "diverged" not in run])


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _seconds(ledger: Ledger, chosen: Key) -> float | None:
    """Of training for a whole run, from the one that had the machine for itself."""
    for key, run in ledger.runs.items():
        if key == replace(chosen, stage="time", epochs=key.epochs):
            return float(run["seconds"]) * EPOCHS_OF_A_RUN / key.epochs
    return None


def _range(ledger: Ledger, chosen: Key, epochs: int) -> dict[str, float] | None:
    """Of learning rates within a point of the best, in searches."""
    search = Search(chosen.entrant, chosen.batch, epochs, chosen.model)
    try:
        low, high = search.width(ledger.score, chosen.setting)
    except Missing:
        return None
    return {"low": low, "high": high, "octaves": math.log2(high / low)}


def _difference(row: dict[str, Any], peer: dict[str, Any]) -> dict[str, Any] | None:
    ours, theirs = common_seeds(row["scores"], peer["scores"])
    return asdict(paired_difference(ours, theirs)) if ours else None


def everything_tested(ledger: Ledger) -> str:
    """Every setting that has met the test set, chosen or not: an open contest changes its mind."""
    places = {replace(key, seed=0) for key in ledger.runs if key.stage == "final"}
    lines = [
        "| model | batch | optimizer | lr, decay, momentum | tested, % | n "
        "| training's statistics | training loss |",
        "|---|--:|---|---|--:|--:|--:|--:|",
    ]
    for key in sorted(places, key=lambda key: (key.model, key.batch, key.entrant, str(key))):
        setting = key.setting
        runs = ledger.seeds(key)
        interval = asdict(mean_interval([_score(run) for run in runs.values()]))
        own = f"{setting.lr:.3g}, {setting.decay:g}, {setting.momentum:g}"
        running = _cell(_with_training_statistics(runs), "{:.2f}")
        loss = _mean([run["train_loss"] for run in runs.values() if "diverged" not in run])
        lines.append(
            f"| {key.model} | {key.batch} | {key.entrant} | {own} | {mean_and_half(interval)} "
            f"| {len(runs)} | {running} | {_cell(loss, '{:.3f}')} |"
        )
    return "\n".join(lines)


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
    return "\n".join(_line([cells[i] for i in kept]) for cells in lines)


def _cells(row: dict[str, Any]) -> list[str]:
    setting, interval, d, width = (row[k] for k in ("setting", "interval", "difference", "range"))
    paired = d is not None and d["low"] is not None
    return [
        name(row),
        f"{setting['lr']:.3g}, {setting['decay']:g}, {setting['momentum']:g}",
        f"{row['held_out']:.2f}",
        mean_and_half(interval),
        str(interval["n"]) + (f" ({interval['diverged']} ✗)" if interval["diverged"] else ""),
        f"{d['mean']:+.2f} [{d['low']:+.2f}, {d['high']:+.2f}]".replace("-", "−") if paired else "",
        _cell(None if d is None else d["p"], "{:.2g}"),
        _cell(row["with_training_statistics"], "{:.2f}"),
        _cell(row["steps_to_target"], "{:g}"),
        _cell(row["seconds"], "{:.1f}"),
        ""
        if width is None
        else f"{width['low']:.3g} to {width['high']:.3g}, {width['octaves']:g} octaves",
    ]


def overview(parts: list[dict[str, Any]]) -> str:
    """All batch sizes as one table: accuracies, and the steps to 90 % in brackets."""
    tested = [part for part in parts if any(row["scores"] for row in part["rows"])]
    steps = [max(row["steps"] or 0 for row in part["rows"]) for part in tested]
    heads = [f"batch {p['batch']}, {n} steps" for p, n in zip(tested, steps, strict=True)]
    by_name = [{name(row): row for row in part["rows"]} for part in tested]
    ranked: dict[str, None] = {}  # by the largest batch that both have been tested at
    for rows in reversed(by_name):
        best_first = sorted(rows, key=lambda own: -(rows[own]["interval"]["mean"] or 0.0))
        ranked |= dict.fromkeys(own for own in best_first if rows[own]["scores"])
    lines = [["test accuracy, %", *heads], ["---", *["--:"] * len(heads)]]
    for own in ranked:
        lines.append([own, *(_tested(rows.get(own)) for rows in by_name)])
    return "\n".join(map(_line, lines))


def _tested(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return mean_and_half(row["interval"]) + _cell(row["steps_to_target"], " ({:g})")


def name(row: dict[str, Any]) -> str:
    return f"**{row['entrant']}**" if row["ours"] else str(row["entrant"])


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def mean_and_half(interval: dict[str, Any]) -> str:
    half = None if interval["high"] is None else interval["high"] - interval["mean"]
    return _cell(interval["mean"], "{:.2f}") + _cell(half, " ± {:.2f}")


def _rank(row: dict[str, Any]) -> float:
    mean = row["interval"]["mean"]
    return float(row["held_out"] if mean is None else mean)


def _cell(value: Any, form: str) -> str:
    return "" if value is None else form.format(value)
