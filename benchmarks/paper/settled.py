"""Claims that a measurement or a proof decides, without a comparison over seeds.

Each function reads what the repository publishes and returns a verdict with its figure, or None if
it has not been measured yet. The rules are stated here and were fixed with the list of claims,
except for claim 6, whose measurement is older than the list.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.common.ledger import Run
from benchmarks.paper.claim_tests import count_seeds, fit_slope
from benchmarks.paper.judging import Verdict, combine, judge, weigh_equivalence
from benchmarks.paper.run_lines import Results

ROOT = Path(__file__).parents[2]
FALLING_LR = ROOT / "results/spectrum-figure-h200.json"
MANY, LARGE = 10, 0.1  # eigenvalues; of λmax
STRAIGHT, GROWTH_SEEDS = 2.0, 3
GONE = 0.5  # of λmin left over the last two thirds of a run: on its way to zero
RACE = ("neumann", "cg Gauss-Newton", "cg Hessian")  # claim 16
ENDS = ("smallest", "largest")  # of a spectrum
LATER = 1.1  # times as long counts as the same time


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
    late = [_is_repulsion_larger(run, 2 / 3, 1.0) for run in runs]
    verdict = Verdict.INCONCLUSIVE
    if all(early) and all(late):
        verdict = Verdict.SUPPORTED
    elif not any(early) or not any(late):
        verdict = Verdict.NOT_SUPPORTED
    shares = [
        max(cubic, repulsive) / norm
        for run in runs
        for _, cubic, repulsive, norm in run["forces"]
        if norm and None not in (cubic, repulsive)
    ]
    beside = f"; the larger is at most {100 * max(shares):.1f} % of the gradient" if shares else ""
    return Settled(
        verdict,
        f"cubic larger early in {sum(early)} of {len(runs)} runs, repulsion late in "
        f"{sum(late)}{beside}",
    )


def _is_cubic_larger(run: Run, start: float, end: float) -> bool:
    return _find_excess(run, start, end) > 0


def _is_repulsion_larger(run: Run, start: float, end: float) -> bool:
    return _find_excess(run, start, end) < 0


def _find_excess(run: Run, start: float, end: float) -> float:
    """The cubic force less the repulsion in a part of a run (median); 0 if no force acts there.

    A force that was not finite is None.
    """
    within = (line for line in run["forces"] if start <= line[0] <= end)
    lines = [line for line in within if any(line[1:3]) and None not in line[1:3]]
    return median(line[1] - line[2] for line in lines) if lines else 0.0


# ---------------------------------------------------------------------- claim 16


def race_conjugate_gradients(results: Results) -> Settled | None:
    """Supported if in every seed Neumann ends with a lower loss on the test set than both forms of
    conjugate gradients, in at most LATER times their time; not supported if in every seed one of
    them does so. A run that diverged has no loss and loses.

    The training loss is a mean over the last epoch, which is half of a run of two."""
    neumann, *others = RACE
    if not has_all_seeds(results, "krylov", RACE):
        return None
    runs = {arm: results.find("krylov", arm) for arm in RACE}
    beaten = dict.fromkeys(others, 0)  # by Neumann: seeds
    beating = dict.fromkeys(others, 0)
    for seed, ours in runs[neumann].items():
        for arm in others:
            beaten[arm] += _wins(ours, runs[arm][seed])
            beating[arm] += _wins(runs[arm][seed], ours)
    count = len(runs[neumann])
    verdict = Verdict.INCONCLUSIVE
    if all(each == count for each in beaten.values()):
        verdict = Verdict.SUPPORTED
    elif any(each == count for each in beating.values()):
        verdict = Verdict.NOT_SUPPORTED
    return Settled(verdict, "; ".join(_describe_race(arm, runs[arm].values()) for arm in RACE))


def _wins(run: Run, other: Run) -> bool:
    """Whether a run ends with a lower loss than another, in about the same time."""
    if run.get("diverged") or other.get("diverged"):
        return not run.get("diverged")
    return bool(run["loss"] < other["loss"] and run["seconds"] <= LATER * other["seconds"])


def _describe_race(arm: str, runs: Iterable[Run]) -> str:
    ended = [run for run in runs if not run.get("diverged")]
    if not ended:
        return f"{arm}: diverged"
    loss, seconds = (fmean(run[key] for run in ended) for key in ("loss", "seconds"))
    return f"{arm}: loss {loss:.3f} after {seconds:.0f} s"


# ---------------------------------------------------------------------- claims 17 to 19


def judge_growth(results: Results) -> Settled | None:
    """Supported if λmax grows in both halves of every run, and the slopes of the halves are within
    a factor of STRAIGHT of each other (two one-sided tests of its logarithm over the seeds).

    Reads what `benchmarks.spectrum.along_training --constant-lr --seed N` writes with --output
    results/paper/growth-N.json. Without at least three of them there is only a run whose learning
    rate falls to zero, which cannot decide about a line.
    """
    paths = sorted(results.folder.glob("growth-*.json"))
    if len(paths) < GROWTH_SEEDS:
        first, second, start, end = _find_slopes(_read_points(FALLING_LR))
        return Settled(
            Verdict.INCONCLUSIVE,
            f"it grows, from {start:.0f} to {end:.0f}, by {first:.1f} an epoch in the first half "
            f"of the run and {second:.1f} in the second, while the learning rate falls",
        )
    slopes = [_find_slopes(_read_points(path)) for path in paths]
    if min(min(first, second) for first, second, *_ in slopes) <= 0:
        falling = sum(min(first, second) <= 0 for first, second, *_ in slopes)
        figure = f"it does not grow in both halves of {falling} of {len(slopes)} runs"
        return Settled(Verdict.NOT_SUPPORTED, figure)
    evidence = weigh_equivalence([math.log(b / a) for a, b, *_ in slopes], math.log(STRAIGHT))
    found = combine([evidence])
    ratio, low, high = (math.exp(v) for v in (evidence.mean, evidence.low, evidence.high))
    start, end = (fmean(each[k] for each in slopes) for k in (2, 3))
    return Settled(
        judge(found, found).verdict,
        f"from {start:.0f} to {end:.0f}; the second half is {ratio:.2f} [{low:.2f}, {high:.2f}] "
        f"times as steep as the first (90 % interval), n = {evidence.n}",
    )


def _find_slopes(points: list[dict[str, Any]]) -> tuple[float, float, float, float]:
    """Of λmax an epoch, in both halves of a run; and its first and last value."""
    epochs = [point["epoch"] for point in points]
    largest = [_take_middle(point, "largest") for point in points]
    half = len(points) // 2
    first, second = (fit_slope(epochs[k], largest[k]) for k in (slice(half), slice(half, None)))
    return first, second, largest[0], largest[-1]


def follow_smallest(results: Results) -> Settled | None:
    """Supported if a line through |λmin| falls to GONE or less of its height over the last two
    thirds of every run; not supported if it keeps more in every run. Reads the same files as
    judge_growth; the run whose learning rate falls cannot decide."""
    paths = sorted(results.folder.glob("growth-*.json"))
    if len(paths) < GROWTH_SEEDS:
        points = _read_points(FALLING_LR)
        smallest, largest = ([_take_middle(p, end) for p in points] for end in ENDS)
        late = smallest[len(points) // 3 :]
        return Settled(
            Verdict.INCONCLUSIVE,
            f"{smallest[0]:.0f} at the start, then between {min(late):.1f} and {max(late):.1f} in "
            "the last two thirds, while the learning rate falls; relative to λmax it goes from "
            f"{-100 * smallest[0] / largest[0]:.0f} % to "
            f"{-100 * smallest[-1] / largest[-1]:.0f} %".replace("-", "−"),
        )
    runs = [[_take_middle(p, ENDS[0]) for p in _read_points(path)] for path in paths]
    left = [_find_share_left(run[len(run) // 3 :]) for run in runs]
    gone = [share <= GONE for share in left]
    verdict = Verdict.INCONCLUSIVE
    if all(gone) or not any(gone):
        verdict = Verdict.SUPPORTED if all(gone) else Verdict.NOT_SUPPORTED
    start, end = (fmean(run[k] for run in runs) for k in (0, -1))
    return Settled(
        verdict,
        f"from {start:.1f} to {end:.1f}; over the last two thirds its magnitude goes to "
        f"{min(left):.2f} to {max(left):.2f} of what it was, {len(runs)} runs".replace("-", "−"),
    )


def _find_share_left(values: list[float]) -> float:
    """The height of a line through the values at its end, as a share of its start."""
    slope = fit_slope(list(range(len(values))), values)
    half = slope * (len(values) - 1) / 2
    return (fmean(values) + half) / (fmean(values) - half)


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


def _read_points(path: Path) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = json.loads(path.read_text())["points"]
    return points


def _take_middle(point: dict[str, Any], end: str) -> float:
    values = [batch["enough"][end]["value"] for batch in point["batches"]]
    middle = median(values)
    if not math.isfinite(middle):
        raise ValueError(f"epoch {point['epoch']} has a λ of {middle}")
    return float(middle)
