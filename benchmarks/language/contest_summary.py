"""What the runs of the language contest amount to: tables, verdicts in words, steps saved."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from benchmarks.common.ledger import MissingRunError, Run
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
from benchmarks.language.search_space import choose_start
from neumann.lab.studies.statistics import (
    Difference,
    correct_by_holm,
    mean_interval,
    paired_difference,
    select_common_seeds,
)

RESAMPLES = 10_000
LARGER = "the width and depth of GPT-2 124M (110 million parameters with 16,384 tokens)"
SIGNIFICANT = 0.05
EARLIER = "In parentheses: bracketed before another coordinate moved, but not since."


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


def format_contest(contest: LanguageContest) -> str:
    """All tables and sentences that the runs so far allow."""
    verdicts = find_verdicts(contest)
    parts = [_format_validation(contest)]
    if verdicts:
        parts += [_format_verdicts(contest, verdicts), *map(describe_verdict, verdicts)]
        parts.append(_format_tests(contest))
    parts.append(describe_larger(contest))
    return "\n\n".join(part for part in parts if part)


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


def _find_p(lead: Difference) -> float | None:
    """A difference over seeds of which ours lost some is no lead, however large it is."""
    return 1.0 if lead.diverged_b else lead.p


def describe_verdict(verdict: Verdict) -> str:
    """A sentence: who is ahead, by how much, how sure that is, and how many steps it saves."""
    lead, place = verdict.lead, f"{verdict.batch:,} tokens per step and {verdict.steps} steps"
    if lead.mean is None:
        return f"At {place}, there is no pair of runs that both finished."
    level = verdict.p is not None and verdict.p >= SIGNIFICANT and not lead.diverged_b
    word = "ahead of" if lead.mean > 0 else "behind"
    between = "" if lead.low is None else f", 95 % interval {lead.low:+.4f} to {lead.high:+.4f}"
    kind = "corrected p" if verdict.primary else "descriptive, p"
    p = "no p" if verdict.p is None else f"{kind} {verdict.p:.2g}"
    who = ("our worse setting", "the better one of ") if verdict.primary else ("ours", "")
    text = f"At {place}, {who[0]} is {word} {who[1]}{verdict.peer} by "
    text += f"{abs(lead.mean):.4f} nats (n {lead.n}{between}, {p})"
    text += ", which is within the noise." if level else "."
    if lead.diverged_b:
        text += f" But {lead.diverged_b} of our runs diverged, so this is no lead."
    if lead.diverged_a:
        text += f" {lead.diverged_a} runs of the peer diverged and are left out."
    return f"{text} {_describe_saving(verdict.saving)}".strip()


def describe_larger(contest: LanguageContest) -> str:
    """A sentence about the larger network; empty without its runs."""
    try:
        keys = contest.list_larger()
        ours, theirs = (contest.ledger.find(key)["loss"] for key in keys)
    except MissingRunError:
        return ""
    peer = keys[1].setting.arm
    if ours is None or theirs is None:
        lost = " and ".join(a for a, x in ((OURS, ours), (peer, theirs)) if x is None)
        return f"At {LARGER}, with the settings of the small network, {lost} diverged."
    word = "ahead of" if ours < theirs else "behind"
    return (
        f"At {LARGER}, with the settings of the small network, ours is "
        f"{word} {peer} by {abs(theirs - ours):.4f} nats on the validation set "
        f"({ours:.4f} and {theirs:.4f}; n 1)."
    )


def _describe_saving(saving: Saving | None) -> str:
    if saving is None:
        return ""
    ours = "Our setting with the lowest validation loss"
    if saving.middle >= saving.longest:
        return f"{ours} saves {100 * saving.longest:.0f} % of the steps or more (n {saving.n})."
    if saving.middle < 0:
        interval = f"{-100 * saving.high:.1f} to {-100 * saving.low:.1f} %"
        more = f"{-100 * saving.middle:.1f} % more steps for the peer's loss"
        return f"{ours} needs {more} (95 % interval {interval}, n {saving.n})."
    interval = f"{100 * saving.low:.1f} to {100 * saving.high:.1f} %"
    interval += " or more" if saving.high >= saving.longest else ""
    return (
        f"{ours} has the peer's loss after {100 * (1 - saving.middle):.1f} % of the steps: "
        f"{100 * saving.middle:.1f} % are saved (95 % interval {interval}, n {saving.n})."
    )


def compare_finalists(contest: LanguageContest, batch: int, steps: int) -> Difference:
    """The peer's better setting minus our worse one: positive if we lead whatever was chosen.

    MissingRunError unless all settings of both that take part have been tested.
    """
    peer = contest.find_peer(batch, steps)
    ours, theirs = (
        [
            contest.find_losses("test", batch, steps, setting)
            for setting in contest.list_finalists(arm, batch, steps)
        ]
        for arm in (OURS, peer)
    )
    if not all((*ours, *theirs)):
        raise MissingRunError(f"no test at {batch} tokens per step")

    def mean(losses: Mapping[int, float]) -> float:
        return sum(losses.values()) / len(losses)

    return paired_difference(*select_common_seeds(min(theirs, key=mean), max(ours, key=mean)))


def find_saving(contest: LanguageContest, batch: int, steps: int) -> Saving | None:
    """What our best setting saves; None without the runs.

    Ours is the best on the validation set, whose shorter runs there are. The peer's is the one that
    did better in the test.
    """
    tested = [
        losses
        for theirs in contest.list_finalists(contest.find_peer(batch, steps), batch, steps)
        if (losses := _drop_diverged(contest.find_losses("test", batch, steps, theirs)))
    ]
    if not tested:
        return None
    target = min(tested, key=lambda losses: fmean(losses.values()))
    setting = contest.rank_settings(OURS, batch, steps)[0]
    shorter = [round(share * steps) for share in SHARES]  # 42 of 50 steps are 84 %, not 85 %
    lengths = {
        length / steps: contest.find_losses("saving", batch, length, setting) for length in shorter
    }
    lengths[1.0] = contest.find_losses("test", batch, steps, setting)
    lengths = {share: _drop_diverged(losses) for share, losses in lengths.items()}
    common = set.intersection(*(set(losses) for losses in (target, *lengths.values())))
    if not common:
        return None
    return Saving(*estimate_saving(lengths, target), longest=1 - min(lengths), n=len(common))


def _drop_diverged(losses: Mapping[int, float]) -> dict[int, float]:
    return {seed: loss for seed, loss in losses.items() if math.isfinite(loss)}


def estimate_saving(
    lengths: dict[float, dict[int, float]], target: dict[int, float], seed: int = 0
) -> tuple[float, float, float]:
    """The share of the steps that is saved at equal loss, with a bootstrap interval of 95 %.

    It is never above what the shortest length saves. If the peer ends lower than we do, it is
    negative: the steps that we need more, on a straight line through our losses.

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
        slope = np.polyfit(shares, means, 1)[0]
        if wanted < means[-1] and slope < 0:
            return float((means[-1] - wanted) / slope)
        # np.interp needs a rising axis, and the loss falls with the length.
        return float(1 - np.interp(-wanted, -means, shares))

    draw = np.random.default_rng(seed)
    drawn = [saving(draw.integers(len(seeds), size=len(seeds))) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return saving(np.arange(len(seeds))), float(low), float(high)


def _format_validation(contest: LanguageContest) -> str:
    """The best setting of every arm at every batch, by validation loss.

    A line below it explains parentheses, if there are any.
    """
    rows = []
    for batch, steps in (*LENGTHS.items(), LONGER):
        for arm in (OURS, *MUON, *OTHERS):
            try:
                best = contest.rank_settings(arm, batch, steps)
            except MissingRunError:
                continue
            found = contest.ledger.find(contest.make_key("tune", batch, steps, best[0], 0))
            s, used = best[0], choose_start(arm)
            rates = (f"{s.lr * scale:.3g}" for scale in (1, s.embedding, s.output))
            rest = [
                f"{getattr(s, name):g}" if name in used else ""
                for name in ("momentum", "before", "power", "slow")
            ]
            diverged = found["loss"] is None
            losses = ("diverged", "") if diverged else _format_losses(found)
            never = contest.find_unbracketed(arm, batch, steps, anywhere=True)
            open_ones = ", ".join(
                name if name in never else f"({name})"
                for name in contest.find_unbracketed(arm, batch, steps)
            )
            cells = (*losses, *rates, *rest, f"{s.decay:.3g}", str(len(best)), open_ones)
            rows.append((f"{batch:,} × {steps}", arm, *cells))
    heads = ["tokens × steps", "arm", "validation", "training", "lr", "embedding", "output"]
    heads += ["μ", "before", "power", "slow", "decay", "runs", "not bracketed"]
    if not rows:
        return ""
    table = format_table(heads, "ll" + "r" * 11 + "l", rows)
    return f"{table}\n\n{EARLIER}" if "(" in table else table


def _format_losses(run: Run) -> tuple[str, str]:
    return f"{run['loss']:.4f}", f"{run['train_loss']:.4f}"


def _format_tests(contest: LanguageContest) -> str:
    """Every setting that was tested."""
    rows = []
    for length in (*LENGTHS.items(), LONGER):
        for arm in (OURS, *MUON, *OTHERS):
            try:
                ranked = contest.rank_settings(arm, *length)
            except MissingRunError:
                continue
            for place, setting in enumerate(ranked, start=1):
                losses = contest.find_losses("test", *length, setting)
                if not losses:
                    continue
                found = mean_interval(list(losses.values()))
                mean = "" if found.mean is None else f"{found.mean:.4f}"
                if found.mean is not None and found.high is not None:
                    mean += f" ± {found.high - found.mean:.4f}"
                cells = (str(place), mean, str(found.n), str(found.diverged or ""))
                rows.append(("{:,} × {}".format(*length), arm, *cells))
    heads = ("tokens × steps", "arm", "rank on validation", "test, ± 95 %", "n", "diverged")
    return format_table(heads, "llrrrr", rows) if rows else ""


def _format_verdicts(contest: LanguageContest, verdicts: Sequence[Verdict]) -> str:
    rows = []
    for verdict in verdicts:
        batch, steps = verdict.batch, verdict.steps
        cells = []
        for arm in (OURS, verdict.peer):
            setting = contest.rank_settings(arm, batch, steps)[0]
            losses = contest.find_losses("test", batch, steps, setting)
            found = mean_interval(list(losses.values()))
            cells.append("" if found.mean is None else f"{found.mean:.4f} (n {found.n})")
            training = contest.find_training_losses("test", batch, steps, setting)
            cells.append(f"{sum(training) / len(training):.4f}" if training else "")
        lead, difference = "", verdict.lead
        if difference.mean is not None and difference.low is not None:
            lead = f"{difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"
        p = f"{verdict.p:.2g}" if verdict.primary and verdict.p is not None else ""
        saved, saving = "", verdict.saving
        if saving is not None:
            more = " or more" if saving.high >= saving.longest else ""
            interval = f"[{100 * saving.low:.1f}, {100 * saving.high:.1f}{more}]"
            saved = f"{100 * saving.middle:.1f} % {interval}"
        ours, theirs = cells[:2], cells[2:]
        rows.append((f"{batch:,} × {steps}", *ours, verdict.peer, *theirs, lead, p, saved))
    heads = ["tokens × steps", "ours", "training", "best peer", "its loss", "training"]
    heads += ["lead", "p (Holm)", "steps saved"]
    return format_table(heads, "lrrlrrrrr", rows)
