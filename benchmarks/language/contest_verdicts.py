"""Who is ahead in the language contest, how sure that is, and how many steps it saves."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats  # type: ignore[import-untyped, unused-ignore]

from benchmarks.common.ledger import MissingRunError
from benchmarks.language.contest_rules import LENGTHS, LONGER, OURS, SEEDS, SEEDS_OF_OTHERS
from benchmarks.language.contest_stages import LanguageContest, drop_diverged
from benchmarks.language.language_arms import Setting
from neumann.lab.studies.statistics import (
    Difference,
    correct_by_holm,
    paired_difference,
    select_common_seeds,
)

RESAMPLES = 10_000
SIGNIFICANT = 0.05
# The goal: ahead at the larger two batch sizes, with this saving at least, and not behind by more
# than this margin at the smallest.
LEAST_SAVING = 0.10  # lower end of the interval
MARGIN = 0.005  # nats


@dataclass(frozen=True)
class Saving:
    """The share of the steps that is saved at equal loss, with a bootstrap interval of 95 %."""

    middle: float
    low: float
    high: float
    longest: float  # the largest saving that the shortest runs could show
    n: int  # seeds


@dataclass(frozen=True)
class Verdict:
    """Ours against the best peer at one batch size and length, on the test set."""

    batch: int
    steps: int
    peer: str
    lead: Difference  # their better setting minus our worse one: positive if we lead
    p: float | None  # corrected by Holm if it is a primary comparison; 1 if a run of ours diverged
    primary: bool
    saving: Saving | None


def find_verdicts(contest: LanguageContest) -> list[Verdict]:
    """One for each batch size and length that has been tested."""
    compared = {}
    for length in (*LENGTHS.items(), LONGER):
        try:
            compared[length] = compare_finalists(contest, *length)
        except MissingRunError:
            continue
    primary = [length for length in compared if length in LENGTHS.items()]
    tested = [length for length in primary if _find_p(compared[length]) is not None]
    # Comparisons that are still to come count too: their number was fixed before the first.
    missing = [1.0] * (len(LENGTHS) - len(tested))
    p_found = (_find_p(compared[length]) or 0.0 for length in tested)
    corrected = correct_by_holm([*p_found, *missing])
    p_values = dict(zip(tested, corrected, strict=False))
    return [
        Verdict(
            *length,
            contest.find_peer(*length),
            lead,
            p_values.get(length) if length in primary else _find_p(lead),
            length in primary,
            find_saving(contest, *length),
        )
        for length, lead in compared.items()
    ]


def list_missed_goals(verdicts: Sequence[Verdict]) -> list[str] | None:
    """What the goal asks for and the verdicts do not show; None before all three are known."""
    found = {verdict.batch: verdict for verdict in verdicts if verdict.primary}
    if len(found) < len(LENGTHS):
        return None
    missed = []
    smallest, *larger = sorted(found)
    lead = found[smallest].lead
    if lead.diverged_b:
        missed.append(f"{lead.diverged_b} of our runs diverged at {smallest:,} tokens per step")
    elif lead.low is None or lead.low < -MARGIN:
        missed.append(f"at {smallest:,} tokens per step ours may be behind by more than {MARGIN}")
    for batch in larger:
        verdict = found[batch]
        mean, p, saving = verdict.lead.mean, verdict.p, verdict.saving
        if mean is None or mean <= 0 or p is None or p >= SIGNIFICANT:
            missed.append(f"there is no significant lead at {batch:,}")
        if saving is None or saving.low < LEAST_SAVING:
            least = "unknown" if saving is None else f"{100 * saving.low:.1f} %"
            missed.append(f"the lower end of the saving at {batch:,} is {least}")
    return missed


def _find_p(lead: Difference) -> float | None:
    """A difference over seeds of which ours lost some is no lead, however large it is."""
    return 1.0 if lead.diverged_b else lead.p


def compare_finalists(contest: LanguageContest, batch: int, steps: int) -> Difference:
    """The peer's better setting minus our worse one: positive if we lead whatever was chosen.

    MissingRunError unless all settings of both that take part have been tested with all seeds.
    """
    compared = choose_compared(contest, batch, steps)
    ours, theirs = (contest.find_losses("test", batch, steps, each) for each in compared)
    return paired_difference(*select_common_seeds(theirs, ours))


def choose_compared(contest: LanguageContest, batch: int, steps: int) -> tuple[Setting, Setting]:
    """Our worse setting in the test and the peer's better one; see `compare_finalists`."""
    seeds = SEEDS_OF_OTHERS if (batch, steps) == LONGER else SEEDS

    def mean(setting: Setting) -> float:
        losses = contest.find_losses("test", batch, steps, setting)
        if set(seeds) - set(losses):
            raise MissingRunError(f"the test at {batch} tokens per step is not complete")
        return sum(losses.values()) / len(losses)

    ours, theirs = (
        contest.list_finalists(arm, batch, steps) for arm in (OURS, contest.find_peer(batch, steps))
    )
    return max(ours, key=mean), min(theirs, key=mean)


def find_saving(contest: LanguageContest, batch: int, steps: int) -> Saving | None:
    """What our best setting on the validation set saves; None before all its shorter runs."""
    if LENGTHS.get(batch) != steps:
        return None
    target = contest.find_target(batch, steps)
    setting = contest.list_finalists(OURS, batch, steps)[0]
    shorter = [keys[0].steps for keys in contest.list_shorter(batch)]
    lengths = {
        length / steps: contest.find_losses("saving", batch, length, setting) for length in shorter
    }
    if any(len(losses) < len(SEEDS_OF_OTHERS) for losses in lengths.values()):
        return None
    lengths[1.0] = contest.find_losses("test", batch, steps, setting)
    lengths = {share: drop_diverged(losses) for share, losses in lengths.items()}
    common = set.intersection(*(set(losses) for losses in (target, *lengths.values())))
    if len(common) < 2:
        return None
    return Saving(*estimate_saving(lengths, target), longest=1 - min(lengths), n=len(common))


def estimate_saving(
    lengths: dict[float, dict[int, float]], target: dict[int, float], seed: int = 0
) -> tuple[float, float, float]:
    """The share of the steps that is saved at equal loss, with a bootstrap interval of 95 %.

    It is never above what the shortest length saves. If the peer ends lower than we do, it is
    negative: the steps that we need more, on a straight line through our losses at the three
    longest lengths. Resampling few seeds gives intervals that are too narrow, as the normal
    distribution would in place of Student's, so they are widened by what these two differ.

    Args:
        lengths: our losses by seed, for each share of the full length, 1 included.
        target: the peer's losses at full length by seed.
        seed: of the resampling.
    """
    seeds = sorted(set.intersection(*(set(losses) for losses in (target, *lengths.values()))))
    shares = np.array(sorted(lengths))
    ours = np.array([[lengths[share][s] for s in seeds] for share in shares])
    theirs = np.array([target[s] for s in seeds])

    def saving(chosen: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> float:
        means, wanted = ours[:, chosen].mean(1), theirs[chosen].mean()
        slope = np.polyfit(shares[-3:], means[-3:], 1)[0]
        if wanted < means[-1] and slope < 0:
            return float((means[-1] - wanted) / slope)
        # np.interp needs a rising axis. The loss falls with the length, but for noise.
        falling = optimize.isotonic_regression(means, increasing=False).x
        return float(1 - np.interp(-wanted, -falling, shares))

    draw = np.random.default_rng(seed)
    drawn = [saving(draw.integers(len(seeds), size=len(seeds))) for _ in range(RESAMPLES)]
    middle, count = saving(np.arange(len(seeds))), len(seeds)
    wider = stats.t.ppf(0.975, count - 1) / stats.norm.ppf(0.975) * (count / (count - 1)) ** 0.5
    low, high = middle + wider * (np.quantile(drawn, (0.025, 0.975)) - middle)
    return middle, float(low), min(float(high), float(1 - shares[0]))
