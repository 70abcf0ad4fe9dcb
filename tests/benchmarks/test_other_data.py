"""Settings of CIFAR-10 on CIFAR-100: the learning rate alone is chosen again."""

import math
from pathlib import Path

import pytest

from benchmarks.ablations import other_data
from benchmarks.ablations.other_data import BATCHES, ENTRANTS, OURS, SEEDS, find_tuned_before
from benchmarks.common.ledger import MissingRunError, Runner
from benchmarks.contest.entrants import ContestLedger


def train(key):
    """Best at twice the learning rate of CIFAR-10; ours is a point ahead."""
    before = find_tuned_before(key.entrant, key.batch)
    away = abs(math.log2(key.setting.lr / before.lr) - 1)
    noise = 0.01 * math.sin(key.seed + len(key.entrant))
    return {"accuracy": 70 + (key.entrant == OURS) - away + noise, "recalibrated": None}


@pytest.fixture
def ledger(tmp_path):
    return ContestLedger(tmp_path / "runs.jsonl")


def test_only_the_learning_rate_is_chosen_again(ledger):
    runner = Runner(ledger, train)
    other_data.run_tuning(runner)
    assert {key.stage for key in ledger.runs} == {"search"}
    for entrant, batch in ((OURS, 512), ("LAMB", 8192)):
        before = find_tuned_before(entrant, batch)
        chosen = other_data.choose(ledger.score, entrant, batch)
        assert chosen.lr == pytest.approx(2 * before.lr)
        assert (chosen.decay, chosen.momentum) == (before.decay, before.momentum)
    other_data.run_tests(ledger, runner)
    tested = [key for key in ledger.runs if key.stage == "final"]
    assert len(tested) == len(BATCHES) * len(ENTRANTS) * SEEDS
    rows = [line.split(" | ") for line in other_data.format_scores(ledger).splitlines()[2:]]
    assert [row[1] for row in rows] == [*ENTRANTS] * 2
    assert all("+1.0" in row[6] and 0 < float(row[7].strip(" |")) < 0.05 for row in rows[1:5])


def test_nothing_is_tested_before_all_are_tuned(ledger):
    runner = Runner(ledger, train)
    other_data.choose(lambda key: runner.finish(key)["accuracy"], OURS, 512)
    with pytest.raises(MissingRunError):
        other_data.run_tests(ledger, runner)
    assert {key.stage for key in ledger.runs} == {"search"}
    assert len(other_data.format_scores(ledger).splitlines()) == 3  # one entrant


def test_the_earlier_test_can_be_shown():
    published = ContestLedger(Path("results/cifar100.jsonl"))
    shown = other_data.format_scores(published, unchanged=True)
    assert "| 512 | Neumann spectral | 0.00375 | 3 | 76.65 |" in shown


def test_p_counts_the_earlier_test_too(ledger):
    runner = Runner(ledger, train)
    other_data.run_tuning(runner)
    other_data.run_tests(ledger, runner)
    alone = other_data.correct_leads(ledger, unchanged=False)
    for entrant in (OURS, "Muon"):
        for seed in range(3):
            before = find_tuned_before(entrant, 512)
            runner.run(other_data.make_key("final", entrant, 512, before, seed))
    with_earlier = other_data.correct_leads(ledger, unchanged=False)
    assert other_data.correct_leads(ledger, unchanged=True).keys() == {(512, "Muon")}
    smallest = min(alone, key=alone.__getitem__)
    assert with_earlier[smallest] == pytest.approx(9 / 8 * alone[smallest])
