"""Invented runs that several tests read."""

import pytest

from benchmarks.common.ledger import Ledger
from benchmarks.paper import claim_tests
from benchmarks.paper.claim_tests import count_seeds
from benchmarks.paper.run_lines import RunKey
from tests.support.language_scores import invent, run_stages


@pytest.fixture(scope="session")
def contest(tmp_path_factory):
    """The language contest after all its stages, on invented losses."""
    return run_stages(tmp_path_factory.mktemp("contest"), invent)


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study of five seeds; returns a function that records the scores of an arm."""
    (tmp_path / "one.toml").write_text("[test]\nseeds = 5\n")
    monkeypatch.setattr(claim_tests, "STUDIES", tmp_path)
    count_seeds.cache_clear()
    ledger = Ledger(tmp_path / "one.jsonl", RunKey)

    def record(arm, scores, point="", **fields):
        for seed, score in enumerate(scores):
            result = {"diverged": True} if score is None else {"score": score}
            ledger.add(RunKey("final", point, arm, seed), {"lr": 0.1, **result, **fields})

    yield record
    count_seeds.cache_clear()
