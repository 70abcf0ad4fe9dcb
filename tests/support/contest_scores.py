"""Scores for the large-batch contest from a formula, and a contest that trains nothing."""

import math

from benchmarks.common.ledger import Runner
from benchmarks.contest.entrants import ContestLedger
from benchmarks.contest.stages import Contest, ContestOptions
from benchmarks.contest.tuning import Search

MUON = Search("Muon", 8192, 12)


def landscape(best_lr, slope=1.0, decay=2.0, momentum=0.6):
    """90 % at the best setting, `slope` less per octave and 1 less per other wrong value."""

    def score(key):
        octaves = abs(math.log2(key.setting.lr / best_lr))
        wrong = (key.setting.decay != decay) + (key.setting.momentum != momentum)
        return 90 - slope * octaves - wrong

    return score


class FakeContest:
    """A contest at batch 8192 whose results are a function of the key."""

    def __init__(self, path, result, *, share=None, **options):
        self.trained = []
        self.ledger = ContestLedger(path)
        self.runner = Runner(self.ledger, self._train, seconds=60.0, share=share)
        chosen = ContestOptions(**{"batches": (8192,), "seeds": 3, **options})
        self.contest = Contest(self.ledger, self.runner, chosen)
        self._result = result

    def _train(self, key):
        self.trained.append(key)
        return self._result(key)
