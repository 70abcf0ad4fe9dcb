"""What the runs of the language contest amount to: tables, corrected p values, steps saved."""

from collections.abc import Mapping

import numpy as np

from benchmarks.common.ledger import MissingRunError
from benchmarks.common.markdown import format_table
from benchmarks.language.contest_stages import (
    LENGTHS,
    LONGER,
    MUON,
    OTHERS,
    OURS,
    SHARES,
    LanguageContest,
)
from neumann.lab.studies.statistics import (
    Difference,
    correct_by_holm,
    mean_interval,
    paired_difference,
    select_common_seeds,
)

RESAMPLES = 10_000


def format_contest(contest: LanguageContest) -> str:
    """All tables that the runs so far allow."""
    parts = [_format_validation(contest)]
    compared = {}
    for batch, steps in (*LENGTHS.items(), LONGER):
        try:
            compared[batch, steps] = compare_finalists(contest, batch, steps)
        except MissingRunError:
            continue
    if compared:
        parts.append(_format_tests(contest, compared))
    return "\n\n".join(part for part in parts if part)


def compare_finalists(contest: LanguageContest, batch: int, steps: int) -> Difference:
    """The peer's better setting minus our worse one: positive if we lead whatever was chosen."""
    peer = contest.find_peer(batch, steps)
    ours, theirs = (
        [
            losses
            for setting in contest.rank_settings(arm, batch, steps)[:2]
            if (losses := contest.find_losses("test", batch, steps, setting))
        ]
        for arm in (OURS, peer)
    )
    if not ours or not theirs:
        raise MissingRunError(f"no test at {batch} tokens per step")

    def mean(losses: Mapping[int, float]) -> float:
        return sum(losses.values()) / len(losses)

    return paired_difference(*select_common_seeds(min(theirs, key=mean), max(ours, key=mean)))


def estimate_saving(
    lengths: dict[float, dict[int, float]], target: dict[int, float], seed: int = 0
) -> tuple[float, float, float]:
    """The share of the steps that is saved at equal loss, with a bootstrap interval of 95 %.

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
        means = ours[:, chosen].mean(1)
        # np.interp needs a rising axis, and the loss falls with the length.
        equal = np.interp(-theirs[chosen].mean(), -means, shares)
        return float(1 - equal)

    draw = np.random.default_rng(seed)
    drawn = [saving(draw.integers(len(seeds), size=len(seeds))) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return saving(np.arange(len(seeds))), float(low), float(high)


def _format_validation(contest: LanguageContest) -> str:
    """The best setting of every arm at every batch, by validation loss."""
    rows = []
    for batch, steps in (*LENGTHS.items(), LONGER):
        for arm in (OURS, *MUON, *OTHERS):
            try:
                best = contest.rank_settings(arm, batch, steps)
            except MissingRunError:
                continue
            found = contest.ledger.find(contest.make_key("tune", batch, steps, best[0], 0))
            s = best[0]
            rates = (f"{s.lr * scale:.3g}" for scale in (1, s.embedding, s.output))
            rest = (f"{value:g}" for value in (s.momentum, s.before, s.decay, s.cooling))
            losses = (f"{found['loss']:.4f}", f"{found['train_loss']:.4f}")
            rows.append((f"{batch:,} × {steps}", arm, *losses, *rates, *rest, str(len(best))))
    heads = ["tokens × steps", "arm", "validation", "training", "lr", "embedding", "output"]
    heads += ["μ", "before", "decay", "cooling", "runs"]
    return format_table(heads, "ll" + "r" * 10, rows) if rows else ""


def _format_tests(contest: LanguageContest, compared: dict[tuple[int, int], Difference]) -> str:
    primary = [key for key in compared if key in LENGTHS.items() and compared[key].p is not None]
    corrected = dict(zip(primary, correct_by_holm([compared[k].p or 0.0 for k in primary]),
                         strict=True))  # fmt: skip
    rows = []
    for (batch, steps), difference in compared.items():
        peer = contest.find_peer(batch, steps)
        cells = []
        for arm in (OURS, peer):
            setting = contest.rank_settings(arm, batch, steps)[0]
            losses = contest.find_losses("test", batch, steps, setting)
            found = mean_interval(list(losses.values()))
            cells.append("" if found.mean is None else f"{found.mean:.4f} (n {found.n})")
        lead = ""
        if difference.mean is not None and difference.low is not None:
            lead = f"{difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"
        p = corrected.get((batch, steps))
        saved = ""
        setting = contest.rank_settings(OURS, batch, steps)[0]
        lengths = {
            share: contest.find_losses("saving", batch, round(share * steps), setting)
            for share in SHARES
        }
        lengths[1.0] = contest.find_losses("test", batch, steps, setting)
        if all(lengths.values()):
            target = contest.find_losses(
                "test", batch, steps, contest.rank_settings(peer, batch, steps)[0]
            )
            middle, low, high = estimate_saving(lengths, target)
            saved = f"{100 * middle:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
        shown = "" if p is None else f"{p:.2g}"
        rows.append((f"{batch:,} × {steps}", cells[0], peer, cells[1], lead, shown, saved))
    heads = ("tokens × steps", "ours", "best peer", "its loss", "lead", "p (Holm)", "steps saved")
    return format_table(heads, "lrlrrrr", rows)
