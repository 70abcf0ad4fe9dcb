"""What the contest has found: for each batch size the winners, tested, beside the best peer.

The best peer is the one of the others with the best held-out score, at full length if any was tuned
so. Differences to it are paired by seed. A run that diverged has no number; it is counted.
"""

import math
import statistics
from dataclasses import asdict, replace
from typing import Any

from contest import ENTRANTS, EPOCHS, Search, Tuning
from ledger import Key, Ledger, Missing, accuracy

from neumann.lab.statistics import common_seeds, mean_interval, paired_difference


def summary(
    ledger: Ledger, tuning: Tuning, model: str = "resnet9", first_seed: int = 0
) -> dict[str, Any]:
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
        rows.append(_row(ledger, chosen, tuning.epochs, first_seed))
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


def _row(ledger: Ledger, chosen: Key, epochs: int, first_seed: int) -> dict[str, Any]:
    setting = chosen.setting
    tested = ledger.seeds(replace(chosen, stage="final", epochs=EPOCHS))
    runs = {seed: run for seed, run in tested.items() if seed >= first_seed}
    scores = scores_of(runs)
    reached = [run.get("steps_to_target") for run in runs.values()]
    return {
        "entrant": chosen.entrant,
        "ours": ENTRANTS[chosen.entrant].ours,
        "setting": asdict(setting),
        "held_out": ledger.score(chosen),  # %
        "held_out_epochs": chosen.epochs,
        "scores": scores,  # %, by seed
        "interval": asdict(mean_interval(list(scores.values()))),
        "with_training_statistics": mean_over(runs, "accuracy"),  # %
        "steps": next((run.get("steps") for run in runs.values()), None),
        "steps_to_target": None if None in reached or not reached else statistics.median(reached),
        "seconds": _seconds(ledger, chosen),
        "range": _range(ledger, chosen, epochs),
    }


def scores_of(runs: dict[int, Any]) -> dict[int, float]:
    """Accuracies by seed, in %; of a run that diverged, not a number."""
    return {seed: math.nan if "diverged" in run else accuracy(run) for seed, run in runs.items()}


def mean_over(runs: dict[int, Any], what: str) -> float | None:
    """Of what the runs have recorded, those aside that diverged."""
    values = [run[what] for run in runs.values() if "diverged" not in run]
    return statistics.fmean(values) if values else None


def _seconds(ledger: Ledger, chosen: Key) -> float | None:
    """Of training for a whole run, from the one that had the machine for itself."""
    for key, run in ledger.runs.items():
        if key == replace(chosen, stage="time", epochs=key.epochs):
            return float(run["seconds"]) * EPOCHS / key.epochs
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
