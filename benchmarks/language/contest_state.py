"""How far the language contest is, and what its searches say before the test, in sentences."""

import math
from collections.abc import Sequence

from benchmarks.common.ledger import MissingRunError
from benchmarks.language.contest_rules import LENGTHS, LONGER, MIDDLE, OURS
from benchmarks.language.contest_stages import TESTS, LanguageContest
from benchmarks.language.contest_tables import NAMES
from benchmarks.language.contest_verdicts import (
    LEAST_SAVING,
    SIGNIFICANT,
    Verdict,
    find_verdicts,
    list_missed_goals,
)


def describe_state(contest: LanguageContest) -> str:
    """What is finished, and what it says so far."""
    if not contest.finalists:
        return (
            "The contest is not finished: settings are still being chosen on the validation set, "
            "and the test on fresh seeds comes after that."
        )
    keys = {key for stage in TESTS for key in contest.list_keys(stage)}
    done = len(keys & set(contest.ledger.runs))
    verdicts = [verdict for verdict in find_verdicts(contest) if verdict.primary]
    outcome = _describe_outcome(verdicts)
    if done == len(keys):
        missed = list_missed_goals(verdicts)
        goal = "" if missed is None else f" The goal is {'missed' if missed else 'met'}."
        return f"The contest is finished. {outcome}{goal}".strip()
    text = "The contest is not finished: the settings are chosen and written down, and "
    text += f"{done} of at least {len(keys)} runs that follow are done."
    return f"{text} {outcome}".strip()


def _describe_outcome(verdicts: Sequence[Verdict]) -> str:
    """Where ours is ahead of the best peer, and where not; empty without verdicts."""
    places: dict[str, list[str]] = {}
    for verdict in verdicts:
        places.setdefault(_judge(verdict), []).append(f"{verdict.batch:,}")
    return " ".join(
        f"At {_join(found)} tokens per step, ours is {word} the best peer."
        for word, found in places.items()
    )


def _judge(verdict: Verdict) -> str:
    mean, p = verdict.lead.mean, verdict.p
    if mean is None or p is None or p >= SIGNIFICANT:
        return "not significantly different from"
    return "ahead of" if mean > 0 else "behind"


def _join(found: Sequence[str]) -> str:
    *first, last = found
    return f"{', '.join(first)} and {last}" if first else last


def describe_validation(contest: LanguageContest) -> str:
    """Our lead in the searches, and what it is worth in steps; empty without searches.

    A guess at the saving takes the loss as a straight line in the logarithm of the steps.
    """
    middle, leads = (MIDDLE, LENGTHS[MIDDLE]), {}
    find_best_loss = contest.searches.find_best_loss
    try:
        for length in LENGTHS.items():
            peer = contest.find_peer(*length)
            ours, theirs = (contest.searches.find_best_loss(arm, *length) for arm in (OURS, peer))
            leads[length] = theirs - ours, NAMES[peer]
        short, long = (find_best_loss(OURS, *length) for length in (middle, LONGER))
    except MissingRunError:
        return ""
    peers = list(dict.fromkeys(peer for _, peer in leads.values()))
    same = len(peers) == 1
    listed = [
        f"{lead:+.4f}{'' if same else f' over {peer}'} at {batch:,}".replace("-", "−")
        for (batch, _), (lead, peer) in leads.items()
    ]
    text = "In the searches (validation set, one seed), the lead of our best setting over that of "
    text += f"the best peer{f', {peers[0]},' if same else ''} is, in nats, {_join(listed)} tokens "
    text += "per step."
    gains = [lead for lead, _ in leads.values()]  # from many steps to few
    if gains == sorted(gains):
        text += " The fewer the steps, the larger the lead."
    lead, fall = leads[middle][0], short - long
    if not fall > 0:
        return text
    worth, needed = 1 - 2 ** (-lead / fall), -fall * math.log2(1 - LEAST_SAVING)
    text += f" From {middle[1]} to {LONGER[1]} steps of {MIDDLE:,} tokens, our loss falls by "
    text += f"{fall:.4f} nats. By that measure our lead there is worth {100 * worth:.0f} % of the "
    text += f"steps; {100 * LEAST_SAVING:.0f} % would take {needed:.4f} nats."
    known = any(v.batch == MIDDLE and v.primary for v in find_verdicts(contest))
    if worth < LEAST_SAVING and not known:
        text += " So the goal will probably be missed."
    return text
