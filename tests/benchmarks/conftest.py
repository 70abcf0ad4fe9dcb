"""A contest that several tests read."""

import pytest

from benchmarks.common.ledger import Ledger, Runner
from benchmarks.language.contest_stages import STAGES, LanguageContest
from benchmarks.language.language_runs import RunKey
from tests.support.language_scores import invent


@pytest.fixture(scope="session")
def contest(tmp_path_factory):
    """The language contest after all its stages, on invented losses."""
    ledger = Ledger(tmp_path_factory.mktemp("contest") / "runs.jsonl", RunKey)
    contest = LanguageContest(ledger, Runner(ledger, invent))
    for stage in STAGES:
        contest.run(stage)
    return contest
