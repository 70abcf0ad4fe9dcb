"""Runs for the language contest from a formula, without training."""

import math

from benchmarks.common.ledger import Ledger, Runner
from benchmarks.language.contest_rules import LENGTHS, OURS
from benchmarks.language.contest_stages import STAGES, LanguageContest
from benchmarks.language.language_runs import RunKey

BEST = {OURS: 2.00, "muon": 2.06, "muon by norm": 2.05, "soap": 2.10}  # others: 2.5
GAIN = {65_536: 0.9, 262_144: 0.7}  # of longer runs, so that savings differ; others: 0.5


def invent(key):
    """A bowl in log lr with its own bottom for each arm; longer runs are better."""
    s = key.setting
    bottom = BEST.get(s.arm, 2.5)
    away = 0.01 * math.log2(s.lr / 0.008) ** 2
    gain = GAIN.get(key.tokens_per_step, 0.5)
    length = gain * (LENGTHS.get(key.tokens_per_step, 200) / key.steps - 1)
    noise = 0.001 * math.sin(100 * key.seed + len(s.arm))
    loss = bottom + away + length + noise
    places = range(0, key.steps, max(1, key.steps // 50))
    losses = [loss + 8 / (1 + 40 * place / key.steps) for place in places]
    return {"loss": loss, "train_loss": loss, "losses": losses}


def invent_loss(loss):
    return {"loss": loss, "train_loss": loss, "losses": [loss]}


def run_stages(folder, train, stages=STAGES):
    """The contest after some stages, with the runs in a folder."""
    ledger = Ledger(folder / "runs.jsonl", RunKey)
    contest = LanguageContest(ledger, Runner(ledger, train))
    for stage in stages:
        contest.run(stage)
    return contest
