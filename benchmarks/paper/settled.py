"""Claims that a measurement or a proof decides, without a comparison over seeds.

Each function reads what the repository publishes and returns a verdict with its figure, or None if
it has not been measured yet. The rules are stated here and were fixed with the list of claims,
except for claims 6, 17 and 18, whose measurements are older than the list.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.common.ledger import Run
from benchmarks.paper.claim_tests import count_seeds, fit_slope
from benchmarks.paper.judging import Verdict
from benchmarks.paper.run_lines import Results

ROOT = Path(__file__).parents[2]
MANY, LARGE = 10, 0.1  # eigenvalues; of λmax


@dataclass(frozen=True)
class Settled:
    verdict: Verdict
    figure: str


Measure = Callable[[Results], Settled | None]


def state(verdict: Verdict, figure: str) -> Measure:
    """A claim that a proof, a test or a document of the repository decides."""
    return lambda results: Settled(verdict, figure)


def has_all_seeds(results: Results, study: str, arms: Sequence[str]) -> bool:
    """A verdict should not change as seeds arrive."""
    return all(len(results.find(study, arm)) >= count_seeds(study) for arm in arms)


# ---------------------------------------------------------------------- claim 6


def compare_cost_with_adam(results: Results) -> Settled | None:
    """Supported if no fused step takes more time or state than torch's fused Adam (to 1 %)."""
    rows = json.loads((ROOT / "results/step-h200.json").read_text())["rows"]
    by_name = {(row["case"], row["name"]): row for row in rows}
    cases = sorted({case for case, _ in by_name})
    ratios: dict[str, list[float]] = {}
    for key in ("gpu_ms", "wall_ms", "state_bytes"):
        pairs = [(by_name[c, "Neumann fused"][key], by_name[c, "Adam fused"][key]) for c in cases]
        ratios[key] = [ours / adams for ours, adams in pairs]
    held = max(*ratios["gpu_ms"], *ratios["wall_ms"], *ratios["state_bytes"]) <= 1.01
    device, wall = (
        f"{min(r):.2f} to {max(r):.2f} ×" for r in (ratios["gpu_ms"], ratios["wall_ms"])
    )
    memory = max(ratios["state_bytes"])
    return Settled(
        Verdict.SUPPORTED if held else Verdict.NOT_SUPPORTED,
        f"{device} the time of fused Adam on the device, {wall} by the clock, {memory:.2f} × its "
        "state, on an H200",
    )


# ---------------------------------------------------------------------- claim 11


def compare_forces(results: Results) -> Settled | None:
    """Supported if in every run the cubic force is larger in the first third of the run and the
    repulsion in the last (medians); not supported if one of the two fails in every run."""
    if not has_all_seeds(results, "main-cifar10", ("neumann",)):
        return None
    runs = [run for run in results.find("main-cifar10", "neumann").values() if run.get("forces")]
    if not runs:
        return Settled(Verdict.INCONCLUSIVE, "no run recorded its forces")
    early = [_is_cubic_larger(run, 0.0, 1 / 3) for run in runs]
    late = [not _is_cubic_larger(run, 2 / 3, 1.0) for run in runs]
    verdict = Verdict.INCONCLUSIVE
    if all(early) and all(late):
        verdict = Verdict.SUPPORTED
    elif not any(early) or not any(late):
        verdict = Verdict.NOT_SUPPORTED
    shares = [
        max(cubic, repulsive) / norm
        for run in runs
        for _, cubic, repulsive, norm in run["forces"]
        if norm
    ]
    beside = f"; the larger is at most {100 * max(shares):.1f} % of the gradient" if shares else ""
    return Settled(
        verdict,
        f"cubic larger early in {sum(early)} of {len(runs)} runs, repulsion late in "
        f"{sum(late)}{beside}",
    )


def _is_cubic_larger(run: Run, start: float, end: float) -> bool:
    lines = [line for line in run["forces"] if start <= line[0] <= end and any(line[1:3])]
    return bool(lines) and median(line[1] - line[2] for line in lines) > 0


# ---------------------------------------------------------------------- claim 16


def race_conjugate_gradients(results: Results) -> Settled | None:
    """Supported if no form of conjugate gradients reaches Neumann's last training loss in the time
    that Neumann takes; not supported if one does. Means over the seeds, by the clock."""
    arms = ("neumann", "cg Gauss-Newton", "cg Hessian")
    if not has_all_seeds(results, "krylov", arms):
        return None
    runs = {arm: list(results.find("krylov", arm).values()) for arm in arms}
    ended = {arm: [run for run in each if not run.get("diverged")] for arm, each in runs.items()}
    if not ended["neumann"]:
        return Settled(Verdict.INCONCLUSIVE, "every run of Neumann diverged")
    target = fmean(run["train_loss"] for run in ended["neumann"])
    limit = fmean(run["seconds"] for run in ended["neumann"])
    words, won = [f"Neumann: loss {target:.3f} in {limit:.0f} s"], False
    for arm in arms[1:]:
        if not ended[arm]:
            words.append(f"{arm}: diverged")
            continue
        seconds = [_find_seconds(run, target) for run in ended[arm]]
        when = None if None in seconds else fmean(each for each in seconds if each is not None)
        won |= when is not None and when <= limit
        took = fmean(run["seconds"] for run in ended[arm])
        last = fmean(run["train_loss"] for run in ended[arm])
        reached = f"in {when:.0f} s" if when is not None else "never"
        words.append(f"{arm}: there {reached} (loss {last:.3f} after {took:.0f} s)")
    return Settled(Verdict.NOT_SUPPORTED if won else Verdict.SUPPORTED, "; ".join(words))


def _find_seconds(run: Run, target: float) -> float | None:
    """When a run first has that training loss; the clock counts training alone, evenly."""
    curve = run["train_loss_curve"]
    for epoch, loss in enumerate(curve, start=1):
        if loss is not None and loss <= target:
            return float(run["seconds"]) * epoch / len(curve)
    return None


# ---------------------------------------------------------------------- claims 17 to 19


def describe_growth(results: Results) -> Settled | None:
    """Inconclusive about a line: in the run that we have, the learning rate falls to zero."""
    points = _read_spectrum()
    epochs = [point["epoch"] for point in points]
    largest = [_take_middle(point, "largest") for point in points]
    half = len(points) // 2
    slopes = [
        fit_slope(epochs[part], largest[part]) for part in (slice(None, half), slice(half, None))
    ]
    return Settled(
        Verdict.INCONCLUSIVE,
        f"it grows, from {largest[0]:.0f} to {largest[-1]:.0f}, by {slopes[0]:.1f} an epoch in the "
        f"first half of the run and {slopes[1]:.1f} in the second, while the learning rate falls",
    )


def follow_smallest(results: Results) -> Settled | None:
    """Not supported if |λmin| does not fall in the last two thirds and stays off zero."""
    points = _read_spectrum()
    smallest = [_take_middle(point, "smallest") for point in points]
    largest = [_take_middle(point, "largest") for point in points]
    late = smallest[len(points) // 3 :]
    falls = fit_slope(list(range(len(late))), late) > 0
    return Settled(
        Verdict.INCONCLUSIVE if falls else Verdict.NOT_SUPPORTED,
        f"{smallest[0]:.0f} at the start, then {min(late):.1f} to {max(late):.1f} over the last "
        f"two thirds; relative to λmax {-100 * smallest[0] / largest[0]:.0f} % and "
        f"{-100 * smallest[-1] / largest[-1]:.0f} %".replace("-", "−"),
    )


def count_negative(results: Results) -> Settled | None:
    """Supported if every draw of the weights has at least MANY eigenvalues below −LARGE·λmax; not
    supported if none has. Reads what `benchmarks.spectrum.at_initialization` writes with
    --output results/paper/at-initialization.json."""
    path = results.folder / "at-initialization.json"
    if not path.exists():
        return None
    found = [m for m in json.loads(path.read_text())["measurements"] if m["step"] == 0]
    counts = [
        next(each["below"]["count"] for each in m["beyond"] if each["share"] == LARGE)
        for m in found
    ]
    many = [count >= MANY for count in counts]
    verdict = Verdict.INCONCLUSIVE
    if all(many) or not any(many):
        verdict = Verdict.SUPPORTED if all(many) else Verdict.NOT_SUPPORTED
    ends = [(m["smallest"], m["largest"]) for m in found]
    low, high = (fmean(values) for values in zip(*ends, strict=True))
    return Settled(
        verdict,
        f"{min(counts):.0f} to {max(counts):.0f} of {found[0]['parameters']:,} eigenvalues below "
        f"−{100 * LARGE:.0f} % of λmax; λ from {low:.1f} to {high:.1f}, {len(found)} draws".replace(
            " -", " −"
        ),
    )


def _read_spectrum() -> list[dict[str, Any]]:
    content = json.loads((ROOT / "results/spectrum-figure-h200.json").read_text())
    points: list[dict[str, Any]] = content["points"]
    return points


def _take_middle(point: dict[str, Any], end: str) -> float:
    values = [batch["enough"][end]["value"] for batch in point["batches"]]
    middle = median(values)
    if not math.isfinite(middle):
        raise ValueError(f"results/spectrum-figure-h200.json has a λ of {middle}")
    return float(middle)
