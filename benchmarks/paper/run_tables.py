"""Tables of what was run: accuracy at equal epochs and by batch size, epochs needed, ablations."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from benchmarks.common.ledger import Run
from benchmarks.common.markdown import format_table
from benchmarks.paper.claim_tests import Source, get_score
from benchmarks.paper.length_tests import (
    BATCHES,
    TARGET_EPOCHS,
    average,
    collect_scores,
    find_epochs,
    find_target,
    jackknife,
    list_ended,
    list_lengths,
)
from benchmarks.paper.run_lines import Results, name_point
from neumann.lab.studies.statistics import mean_interval
from neumann.lab.studies.study_files import FINAL

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
ABLATIONS = (
    "regularizers",
    "shorter-runs",
    "sensitivity",
    "warm-up",
    "reset-interval",
    "accumulation",
    "small-batch",
    "idealized",
    "clipping",
)
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
            lr = " and ".join(sorted(rates)) or "diverged at every rate"
            cells = (name, shown, format_score(runs), spread, loss, lr, str(len(ended)))
            rows.append(cells)
    heads = ("data", "arm", "test accuracy, %", "deviation", "training loss", "lr", "n")
    return format_table(heads, "llrrrrr", rows) if rows else NOTHING


def tabulate_scaling(results: Results) -> str:
    """Test accuracy by batch size at equal epochs."""
    rows = []
    steps: dict[int, set[str]] = {batch: set() for batch in BATCHES}
    for arm, shown in ARMS.items():
        found = {b: results.find("scaling", arm, name_point(batch_size=b)) for b in BATCHES}
        cells = [format_score(runs) for runs in found.values()]
        if any(cells):
            rows.append((shown, *cells))
        for batch, runs in found.items():
            steps[batch] |= {f"{run['steps']:,}" for run in runs.values() if "steps" in run}
    if any(steps.values()):
        rows.append(("steps of a run", *(" and ".join(sorted(each)) for each in steps.values())))
    heads = ("test accuracy, %, 60 epochs", *(f"batch {batch:,}" for batch in BATCHES))
    return format_table(heads, "lrrrr", rows) if rows else NOTHING


def tabulate_epochs(results: Results) -> str:
    """Epochs to the mean accuracy of Nesterov SGD at the smallest batch after 30 epochs."""
    point = name_point(batch_size=BATCHES[0], epochs=TARGET_EPOCHS)
    target = find_target(Source("scaling-epochs", "nesterov", point), results)
    if target is None:
        return NOTHING
    rows = []
    for arm in ("neumann", "nesterov", "lars", "spectral"):
        cells = [format_epochs(list_lengths(arm, batch), results, target) for batch in BATCHES]
        if any(cells):
            rows.append((ARMS[arm], *cells))
    heads = (f"epochs to {target:.2f} %", *(f"batch {batch:,}" for batch in BATCHES))
    return format_table(heads, "lrrrr", rows)


def tabulate_ablations(results: Results) -> str:
    """The scores of all arms of the studies that change one thing at a time."""
    rows = []
    for study in ABLATIONS:
        found: dict[Source, dict[int, Run]] = {}
        for key, run in results.open(study).runs.items():
            if key.stage == FINAL:
                found.setdefault(Source(study, key.arm, key.point), {})[key.seed] = run
        for source, runs in found.items():
            rates = sorted({f"{run['lr']:g}" for run in runs.values() if "lr" in run})
            ended = sum(not run.get("diverged") for run in runs.values())
            cells = (str(source), format_score(runs), " and ".join(rates), str(ended))
            rows.append((study, *cells))
    heads = ("study", "arm", "test accuracy, % (clipping: nats)", "lr", "n")
    return format_table(heads, "llrrr", rows) if rows else NOTHING


def format_score(runs: Mapping[int, Run]) -> str:
    """The mean and half of its 95 % interval; runs that diverged are counted."""
    found = mean_interval([get_score(run) for run in runs.values()])
    if found.mean is None:
        return f"{found.diverged} diverged" if found.diverged else ""
    half = f" ± {found.high - found.mean:.2f}" if found.high is not None else ""
    return f"{found.mean:.2f}{half}" + (f", {found.diverged} diverged" if found.diverged else "")


def format_epochs(lengths: Mapping[int, Source], results: Results, target: float) -> str:
    """The epochs of the mean over seeds, with its jackknife interval."""
    scores = {n: found for n, found in collect_scores(lengths, results).items() if found}
    seeds = list_ended(scores)
    if not seeds:
        return ""
    needed = find_epochs(average(scores, seeds), target)
    if not needed.reached:
        return f"more than {max(scores)}"
    if not needed.interpolated:
        return f"at most {needed.epochs:.0f}"

    def estimate(some: Sequence[int]) -> float:
        return math.log(find_epochs(average(scores, some), target).epochs)

    found = mean_interval(jackknife(estimate, seeds))
    text = f"{needed.epochs:.1f}"
    if found.low is not None and found.high is not None:
        text += f" [{math.exp(found.low):.1f}, {math.exp(found.high):.1f}]"
    return text
