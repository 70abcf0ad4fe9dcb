"""Tables of what was run: accuracy at equal epochs and by batch size, and epochs needed."""

import math
from collections.abc import Mapping
from statistics import fmean, stdev

from benchmarks.common.ledger import Run
from benchmarks.common.markdown import format_table
from benchmarks.paper.claim_tests import (
    BATCHES,
    LONGEST,
    SHORTER,
    TARGET_EPOCHS,
    find_epochs,
    get_score,
)
from benchmarks.paper.run_lines import Results, name_point
from neumann.lab.studies.statistics import mean_interval

ARMS = {
    "neumann": "**Neumann**",
    "no regularizers": "**Neumann, α = β = 0**",
    "table 1": "**Neumann, Table 1 to the letter**",
    "nesterov": "Nesterov SGD",
    "rmsprop": "RMSProp",
    "adam": "Adam",
    "lars": "LARS",
    "spectral": "**Neumann spectral**, beyond the paper",
}
SETS = {"CIFAR-10": "main-cifar10", "CIFAR-100": "main-cifar100"}
NOTHING = "No runs yet."


def tabulate_main(results: Results) -> str:
    """Accuracy, its spread, training loss and learning rate of every arm, on both data sets."""
    rows = []
    for name, study in SETS.items():
        for arm, shown in ARMS.items():
            runs = results.find(study, arm)
            ended = [run for run in runs.values() if not run.get("diverged")]
            if not runs:
                continue
            scores = [get_score(run) for run in ended]
            spread = f"{stdev(scores):.2f}" if len(scores) > 1 else ""
            loss = f"{fmean(run['train_loss'] for run in ended):.4f}" if ended else ""
            rates = {f"{run['lr']:g}" for run in runs.values() if "lr" in run}
            lr = " and ".join(sorted(rates)) or "diverged at all"
            cells = (name, shown, format_score(runs), spread, loss, lr, str(len(ended)))
            rows.append(cells)
    heads = ("data", "arm", "test accuracy, %", "deviation", "training loss", "lr", "n")
    return format_table(heads, "llrrrrr", rows) if rows else NOTHING


def tabulate_scaling(results: Results) -> str:
    """Test accuracy by batch size at equal epochs."""
    rows = []
    for arm, shown in ARMS.items():
        cells = [
            format_score(results.find("scaling", arm, name_point(batch_size=batch)))
            for batch in BATCHES
        ]
        if any(cells):
            rows.append((shown, *cells))
    heads = ("test accuracy, %, 60 epochs", *(f"batch {batch:,}" for batch in BATCHES))
    return format_table(heads, "lrrrr", rows) if rows else NOTHING


def tabulate_epochs(results: Results) -> str:
    """Epochs to the mean accuracy of Nesterov SGD at the smallest batch after 30 epochs."""
    point = name_point(batch_size=BATCHES[0], epochs=TARGET_EPOCHS)
    reference = results.find("scaling-epochs", "nesterov", point).values()
    scores = [score for run in reference if math.isfinite(score := get_score(run))]
    if not scores:
        return NOTHING
    target = fmean(scores)
    rows = []
    for arm in ("neumann", "nesterov"):
        cells = [format_epochs(find_lengths(results, arm, batch), target) for batch in BATCHES]
        if any(cells):
            rows.append((ARMS[arm], *cells))
    heads = (f"epochs to {target:.2f} %", *(f"batch {batch:,}" for batch in BATCHES))
    return format_table(heads, "lrrrr", rows)


def find_lengths(results: Results, arm: str, batch: int) -> dict[int, Mapping[int, Run]]:
    """The runs of an arm by their epochs."""
    found = {
        epochs: results.find("scaling-epochs", arm, name_point(batch_size=batch, epochs=epochs))
        for epochs in SHORTER
    }
    found[LONGEST] = results.find("scaling", arm, name_point(batch_size=batch))
    return {epochs: runs for epochs, runs in found.items() if runs}


def format_score(runs: Mapping[int, Run]) -> str:
    """The mean and half of its 95 % interval; runs that diverged are counted."""
    found = mean_interval([get_score(run) for run in runs.values()])
    if found.mean is None:
        return f"{found.diverged} diverged" if found.diverged else ""
    half = f" ± {found.high - found.mean:.2f}" if found.high is not None else ""
    return f"{found.mean:.2f}{half}" + (f", {found.diverged} diverged" if found.diverged else "")


def format_epochs(lengths: Mapping[int, Mapping[int, Run]], target: float) -> str:
    """The geometric mean over seeds, with its 95 % interval; seeds that fail count the longest."""
    seeds = sorted(set.intersection(*(set(runs) for runs in lengths.values()))) if lengths else []
    if not seeds:
        return ""
    needed = [
        find_epochs({n: get_score(runs[seed]) for n, runs in lengths.items()}, target)
        for seed in seeds
    ]
    short = sum(not each.reached for each in needed)
    if short == len(needed):
        return f"more than {max(lengths)}"
    found = mean_interval([math.log(each.epochs) for each in needed])
    if found.mean is None:
        return ""
    text = f"{math.exp(found.mean):.1f}"
    if found.low is not None and found.high is not None:
        text += f" [{math.exp(found.low):.1f}, {math.exp(found.high):.1f}]"
    return f"at least {text}, {short} of {len(needed)} not there" if short else text
