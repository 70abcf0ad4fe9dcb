"""What the contest has found: the tested winners of each batch size beside the best peer.

The best peer is the competing optimizer with the best held-out score; those tuned at full length
come first. Differences to it are paired by seed, and their p is that of one comparison by itself:
`image_families` corrects it. A run that diverged has no score; it is counted.
"""

import math
import statistics
from dataclasses import asdict, replace
from typing import Any

from benchmarks.common.ledger import MissingRunError, Run
from benchmarks.contest.entrants import ENTRANTS, ContestLedger, RunKey, Setting, read_accuracy
from benchmarks.contest.tuning import FINAL_EPOCHS, Search, Tuning
from neumann.lab.studies.statistics import mean_interval, paired_difference, select_common_seeds

EntrantRow = dict[str, Any]  # an entrant at one batch size, as in results/large-batch.json
BatchSummary = dict[str, Any]  # model, batch, best_peer, and the rows of all entrants


def summarize(
    ledger: ContestLedger, tuning: Tuning, model: str = "resnet9", first_seed: int = 0
) -> BatchSummary:
    """The rows of one batch size, for the entrants whose search is finished."""
    rows = []
    for entrant in ENTRANTS:
        try:
            chosen = tuning.find_chosen(entrant)
            if model != "resnet9":
                search = Search(entrant, tuning.batch, tuning.epochs, model)
                chosen = search.key(search.find_lr(ledger.score, chosen.setting))
        except MissingRunError:
            continue
        rows.append(_make_row(ledger, chosen, tuning.epochs, first_seed))
    peers = [row for row in rows if not row["ours"]]
    best = max(peers, key=lambda row: (row["held_out_epochs"], row["held_out"]), default=None)
    for row in rows:
        row["difference"] = None if best is None or row is best else _compare(row, best)
    name = None if best is None else best["entrant"]
    return {"model": model, "batch": tuning.batch, "best_peer": name, "rows": rows}


def find_tested(summary: BatchSummary, entrant: str) -> RunKey:
    """What identifies the final runs of an entrant, at seed 0."""
    setting = next(row["setting"] for row in summary["rows"] if row["entrant"] == entrant)
    model, batch = summary["model"], summary["batch"]
    return RunKey("final", model, batch, FINAL_EPOCHS, entrant, Setting(**setting))


def scores_by_seed(runs: dict[int, Run]) -> dict[int, float]:
    """Accuracies in %; NaN for a run that diverged."""
    return {
        seed: math.nan if "diverged" in run else read_accuracy(run) for seed, run in runs.items()
    }


def average(runs: dict[int, Run], name: str) -> float | None:
    """The mean of a recorded number over the runs that did not diverge."""
    values = [run[name] for run in runs.values() if "diverged" not in run]
    return statistics.fmean(values) if values else None


def _make_row(
    ledger: ContestLedger, chosen: RunKey, search_epochs: int, first_seed: int
) -> EntrantRow:
    tested = ledger.find_seeds(replace(chosen, stage="final", epochs=FINAL_EPOCHS))
    runs = {seed: run for seed, run in tested.items() if seed >= first_seed}
    scores = scores_by_seed(runs)
    return {
        "entrant": chosen.entrant,
        "ours": ENTRANTS[chosen.entrant].ours,
        "setting": asdict(chosen.setting),
        "held_out": ledger.score(chosen),  # %
        "held_out_epochs": chosen.epochs,
        "scores": scores,  # % on the test set, by seed
        "interval": asdict(mean_interval(list(scores.values()))),
        "with_training_statistics": average(runs, "accuracy"),
        "steps": next((run.get("steps") for run in runs.values()), None),
        "seconds": _find_seconds(ledger, chosen),
        "range": _find_range(ledger, chosen, search_epochs),
        "difference": None,  # to the best peer
    }


def _find_seconds(ledger: ContestLedger, chosen: RunKey) -> float | None:
    """The training time of a final run, from the run that was alone on the machine."""
    for key, run in ledger.runs.items():
        if key == replace(chosen, stage="time", epochs=key.epochs):
            return float(run["seconds"]) * FINAL_EPOCHS / key.epochs
    return None


def _find_range(ledger: ContestLedger, chosen: RunKey, epochs: int) -> dict[str, float] | None:
    """The learning rates within a point of the best."""
    search = Search(chosen.entrant, chosen.batch, epochs, chosen.model)
    try:
        low, high = search.find_lr_range(ledger.score, chosen.setting)
    except MissingRunError:
        return None
    return {"low": low, "high": high, "octaves": math.log2(high / low)}


def _compare(row: EntrantRow, peer: EntrantRow) -> dict[str, Any] | None:
    ours, theirs = select_common_seeds(row["scores"], peer["scores"])
    return asdict(paired_difference(ours, theirs)) if ours else None
