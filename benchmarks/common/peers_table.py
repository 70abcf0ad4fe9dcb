"""Are we not worse than our peers, by more than a margin? A table with paired intervals."""

from collections.abc import Mapping, Sequence

from benchmarks.common.markdown import format_difference
from neumann.lab.studies.statistics import mean_interval, paired_difference, select_common_seeds

HEADS = ("score", "n", "we are behind by", "verdict")
ALIGN = "rrrl"

Losses = Mapping[str, Mapping[int, float]]  # by arm, then by seed; the lower the better


def compare_with_peers(
    losses: Losses, ours: str, margin: float, digits: int
) -> dict[str, Sequence[str]]:
    """The cells below HEADS for each arm that has runs.

    We are not worse than a peer if the 95 % upper bound of our deficit, paired by seed, is below
    the margin.
    """
    rows: dict[str, Sequence[str]] = {}
    for arm, found in losses.items():
        mean = mean_interval(list(found.values()))
        if mean.mean is None:
            continue
        behind = verdict = ""
        deficit = paired_difference(*select_common_seeds(losses[ours], found))
        if arm != ours and deficit.mean is not None and deficit.high is not None:
            behind = format_difference(deficit.mean, deficit.low, deficit.high, digits)
            verdict = "not worse" if deficit.high < margin else "may be worse"
        rows[arm] = (f"{mean.mean:.{digits}f}", str(mean.n), behind, verdict)
    return rows
