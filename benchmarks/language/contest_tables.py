"""The language contest in tables and sentences."""

from collections.abc import Mapping, Sequence

from benchmarks.common.ledger import MissingRunError, Run
from benchmarks.common.markdown import format_difference, format_table
from benchmarks.language.contest_rules import LENGTHS, LONGER, MUON, OTHERS, OURS, ROWS, make_key
from benchmarks.language.contest_stages import LanguageContest
from benchmarks.language.contest_verdicts import (
    LEAST_SAVING,
    SIGNIFICANT,
    Saving,
    Verdict,
    choose_compared,
    find_verdicts,
    list_missed_goals,
)
from benchmarks.language.finalists import Length
from benchmarks.language.search_space import choose_start
from neumann.lab.studies.statistics import mean_interval, paired_difference, select_common_seeds

NAMES = {
    OURS: "Neumann spectral",
    "muon": "Muon (RMS of AdamW)",
    "muon original": "Muon (original)",
    "muon by norm": "Muon (by norm)",
    "normuon": "NorMuon",
    "normuon by norm": "NorMuon (by norm)",
    "soap": "SOAP",
    "adamw": "AdamW",
    "schedule-free": "schedule-free AdamW",
    "diagonal": "Neumann diagonal",
    "paper": "Neumann (paper)",
}
LARGER = "the width and depth of GPT-2 124M (110 million parameters with 16,384 tokens)"
OUR_LEAD = (
    "*Our lead* is the test loss of a setting minus that of our setting with the lowest validation "
    "loss, on the same seeds, with a 95 % interval. It is descriptive: there is no correction for "
    "the number of rows."
)
EARLIER = "In parentheses: bracketed before another coordinate moved, but not since."


def format_contest(contest: LanguageContest) -> str:
    """All tables and sentences that the runs so far allow."""
    return "\n\n".join(part for part in make_parts(contest).values() if part)


def make_parts(contest: LanguageContest) -> dict[str, str]:
    """Tables and sentences by name; empty if their runs are missing."""
    verdicts = find_verdicts(contest)
    return {
        "settings": _format_settings(contest),
        "verdicts": _format_verdicts(contest, verdicts) if verdicts else "",
        "sentences": "\n\n".join([*map(describe_verdict, verdicts), *_describe_goal(verdicts)]),
        "tests": _format_tests(contest),
        "larger": describe_larger(contest),
    }


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
    text = f"At {place}, {who[0]} is {word} {who[1]}{NAMES[verdict.peer]} by "
    text += f"{abs(lead.mean):.4f} nats (n {lead.n}{between}, {p})"
    text += ", which is not significant." if level else "."
    if lead.diverged_b:
        text += f" But {lead.diverged_b} of our runs diverged, so this does not count."
    if lead.diverged_a:
        text += f" {lead.diverged_a} runs of the peer diverged and are left out."
    return f"{text} {_describe_saving(verdict.saving)}".strip()


def _describe_goal(verdicts: Sequence[Verdict]) -> list[str]:
    """A sentence on whether the goal is met, once it can be said."""
    missed = list_missed_goals(verdicts)
    if missed is None:
        return []
    goal = (
        "The goal was a significant lead at the larger two batch sizes, with at least "
        f"{100 * LEAST_SAVING:.0f} % of the steps saved, and not to be behind at the smallest. "
    )
    return [f"{goal}It is missed: {'; '.join(missed)}." if missed else f"{goal}It is met."]


def describe_larger(contest: LanguageContest) -> str:
    """A sentence about the larger network; empty without its runs."""
    try:
        keys = contest.list_larger()
        ours, theirs = (contest.ledger.find(key)["loss"] for key in keys)
    except MissingRunError:
        return ""
    peer = keys[1].setting.arm
    if ours is None or theirs is None:
        lost = " and ".join(NAMES[a] for a, x in ((OURS, ours), (peer, theirs)) if x is None)
        return f"At {LARGER}, with the settings of the small network, {lost} diverged."
    word = "ahead of" if ours < theirs else "behind"
    return (
        f"At {LARGER}, with the settings of the small network, ours is "
        f"{word} {NAMES[peer]} by {abs(theirs - ours):.4f} nats on the validation set "
        f"({ours:.4f} and {theirs:.4f}; n 1)."
    )


def _describe_saving(saving: Saving | None) -> str:
    if saving is None:
        return ""
    ours = "Our setting with the lowest validation loss"
    if saving.middle >= saving.longest:
        least = f"95 % interval from {100 * saving.low:.1f} %"
        most = f"{100 * saving.longest:.0f} % of the steps or more"
        return f"{ours} saves {most} ({least}, n {saving.n})."
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


def _format_settings(contest: LanguageContest) -> str:
    """The best setting of every arm at every batch, by validation loss, and what is open there."""
    rows, unbracketed = [], []
    for batch, steps in (*LENGTHS.items(), LONGER):
        for arm in (OURS, *MUON, ROWS, *OTHERS):
            try:
                best = contest.searches.rank_settings(arm, batch, steps)
            except MissingRunError:
                continue
            found = contest.ledger.find(make_key("tune", batch, steps, best[0], 0))
            s, used = best[0], choose_start(arm)
            rates = ", ".join(f"{s.lr * scale:.3g}" for scale in (1, s.embedding, s.output))
            momenta = ", ".join(
                f"{getattr(s, name):g}" if name in used else "–"
                for name in ("momentum", "before", "slow")
            )
            power = f"{s.power:g}" if "power" in used else ""
            diverged = found["loss"] is None
            losses = ("diverged", "") if diverged else _format_losses(found)
            place = f"{batch:,} × {steps}", _show(arm)
            rows.append((*place, *losses, rates, momenta, power, f"{s.decay:.3g}", str(len(best))))
            if found_open := _list_unbracketed(contest, arm, batch, steps):
                unbracketed.append((*place, found_open))
    if not rows:
        return ""
    heads = ["tokens × steps", "arm", "validation", "training", "lr, embedding, output"]
    heads += ["μ, before, slow", "power", "decay", "runs"]
    parts = [format_table(heads, "llrrllrrr", rows)]
    if unbracketed:
        parts.append(format_table((*heads[:2], "not bracketed"), "lll", unbracketed))
    if any("(" in names for *_, names in unbracketed):
        parts.append(EARLIER)
    return "\n\n".join(parts)


def _list_unbracketed(contest: LanguageContest, arm: str, batch: int, steps: int) -> str:
    """The coordinates without a worse value on both sides; in parentheses, had they one before."""
    never = contest.searches.find_unbracketed(arm, batch, steps, anywhere=True)
    return ", ".join(
        name if name in never else f"({name})"
        for name in contest.searches.find_unbracketed(arm, batch, steps)
    )


def _show(arm: str) -> str:
    return f"**{NAMES[arm]}**" if arm == OURS else NAMES[arm]


def _format_losses(run: Run) -> tuple[str, str]:
    training = run["train_loss"]  # None if a step overshot and the run recovered
    return f"{run['loss']:.4f}", "" if training is None else f"{training:.4f}"


def _format_tests(contest: LanguageContest) -> str:
    """Every setting that was tested; the others beside our best one, paired by seed."""
    rows = []
    for length in (*LENGTHS.items(), LONGER):
        for arm in (OURS, *MUON, ROWS, *OTHERS):
            try:
                ranked = contest.searches.rank_settings(arm, *length)
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
                lead = "" if arm == OURS else _format_lead(contest, length, losses)
                rows.append(("{:,} × {}".format(*length), _show(arm), *cells, lead))
    heads = ("tokens × steps", "arm", "rank on validation", "test, ± 95 %", "n", "diverged")
    table = format_table((*heads, "our lead"), "llrrrrr", rows)
    return f"{table}\n\n{OUR_LEAD}" if rows else ""


def _format_lead(contest: LanguageContest, length: Length, losses: Mapping[int, float]) -> str:
    """How far our best setting is ahead of losses by seed; empty without two common seeds."""
    best = contest.list_finalists(OURS, *length)[0]
    ours = contest.find_losses("test", *length, best)
    found = paired_difference(*select_common_seeds(losses, ours))
    lead = format_difference(found.mean, found.low, found.high, digits=4)
    return f"{lead} (n {found.n})" if lead and found.n < len(losses) else lead


def _format_verdicts(contest: LanguageContest, verdicts: Sequence[Verdict]) -> str:
    rows = []
    for verdict in verdicts:
        batch, steps = verdict.batch, verdict.steps
        cells = []
        for setting in choose_compared(contest, batch, steps):
            losses = contest.find_losses("test", batch, steps, setting)
            found = mean_interval(list(losses.values()))
            cells.append("" if found.mean is None else f"{found.mean:.4f} (n {found.n})")
            training = contest.find_training_losses("test", batch, steps, setting)
            cells.append(f"{sum(training) / len(training):.4f}" if training else "")
        difference = verdict.lead
        lead = format_difference(difference.mean, difference.low, difference.high, digits=4)
        p = f"{verdict.p:.2g}" if verdict.primary and verdict.p is not None else ""
        saved, saving = "", verdict.saving
        if saving is not None:
            more = " or more" if saving.high >= saving.longest else ""
            interval = f"[{100 * saving.low:.1f}, {100 * saving.high:.1f}{more}]"
            saved = f"{100 * saving.middle:.1f} % {interval}"
        ours, theirs = cells[:2], cells[2:]
        rows.append((f"{batch:,} × {steps}", *ours, NAMES[verdict.peer], *theirs, lead, p, saved))
    heads = ["tokens × steps", "ours, worse setting", "training"]
    heads += ["best peer", "its better setting", "training", "lead", "p (Holm)", "steps saved"]
    return format_table(heads, "lrrlrrrrr", rows)
