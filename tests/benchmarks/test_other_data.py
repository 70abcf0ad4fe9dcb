"""Settings of CIFAR-10 on CIFAR-100: the learning rate alone is chosen again."""

import math
from pathlib import Path

import pytest

from benchmarks.ablations import other_data
from benchmarks.ablations.other_data_table import (
    BATCHES,
    EARLIER,
    ENTRANTS,
    OURS,
    SEEDS,
    choose,
    find_tested,
    find_tuned_before,
    format_scores,
    make_key,
)
from benchmarks.common.ledger import MissingRunError, Runner
from benchmarks.contest.entrants import ContestLedger
from benchmarks.contest.image_families import RETUNED, find_cifar100, load_families
from benchmarks.contest.trainer import Trainer


def train(key):
    """Best at twice the learning rate of CIFAR-10; ours is a point ahead."""
    before = find_tuned_before(key.entrant, key.batch)
    away = abs(math.log2(key.setting.lr / before.lr) - 1)
    noise = 0.01 * math.sin(key.seed + len(key.entrant))
    return {"accuracy": 70 + (key.entrant == OURS) - away + noise, "recalibrated": None}


@pytest.fixture
def ledger(tmp_path):
    return ContestLedger(tmp_path / "runs.jsonl")


def find_family(ledger):
    return find_cifar100(ledger, ContestLedger(Path("none.jsonl")))


def test_only_the_learning_rate_is_chosen_again(ledger):
    runner = Runner(ledger, train)
    other_data.run_tuning(runner)
    assert {key.stage for key in ledger.runs} == {"search"}
    for entrant, batch in ((OURS, 512), ("LAMB", 8192)):
        before = find_tuned_before(entrant, batch)
        chosen = choose(ledger.score, entrant, batch)
        assert chosen.lr == pytest.approx(2 * before.lr)
        assert (chosen.decay, chosen.momentum) == (before.decay, before.momentum)
    other_data.run_tests(ledger, runner)
    tested = [key for key in ledger.runs if key.stage == RETUNED]
    assert len(tested) == len(BATCHES) * len(ENTRANTS) * SEEDS
    rows = [
        line.split(" | ") for line in format_scores(ledger, find_family(ledger)).splitlines()[2:]
    ]
    assert [row[1] for row in rows] == [*ENTRANTS] * 2
    assert all("+1.0" in row[6] and 0 < float(row[7].strip(" |")) < 0.05 for row in rows[1:5])


def test_nothing_is_tested_before_all_are_tuned(ledger):
    runner = Runner(ledger, train)
    choose(lambda key: runner.finish(key)["accuracy"], OURS, 512)
    with pytest.raises(MissingRunError):
        other_data.run_tests(ledger, runner)
    assert {key.stage for key in ledger.runs} == {"search"}
    assert len(format_scores(ledger, find_family(ledger)).splitlines()) == 3  # one entrant


def test_the_earlier_test_can_be_shown():
    published = ContestLedger(Path("results/cifar100.jsonl"))
    shown = format_scores(published, load_families()["CIFAR-100"], unchanged=True)
    assert "LAMB" not in shown  # it did not take part
    assert "| 512 | Neumann spectral | 0.00375 | 3 | 76.65 |" in shown


def test_earlier_runs_do_not_mix_with_new_seeds(ledger):
    """Not even where the best learning rate is that of CIFAR-10."""
    before = find_tuned_before(OURS, 512)
    for seed in range(3):
        earlier = make_key(EARLIER, OURS, 512, before, seed)
        ledger.add(earlier, {"accuracy": 10.0, "recalibrated": None})

    def train_best_at_the_same(key):
        away = abs(math.log2(key.setting.lr / find_tuned_before(key.entrant, key.batch).lr))
        return {"accuracy": 70 - away, "recalibrated": None}

    runner = Runner(ledger, train_best_at_the_same)
    other_data.run_tuning(runner)
    other_data.run_tests(ledger, runner)
    assert choose(ledger.score, OURS, 512) == before
    for unchanged, expected in ((True, [10.0] * 3), (False, [70.0] * SEEDS)):
        tested = ledger.find_seeds(find_tested(ledger, unchanged)[512, OURS])
        assert [run["accuracy"] for run in tested.values()] == expected


def test_both_tests_are_scored_on_the_test_set():
    trainer = Trainer("cifar100", None)
    for stage, held_out in ((EARLIER, False), (RETUNED, False), ("search", True)):
        key = make_key(stage, OURS, 512, find_tuned_before(OURS, 512))
        assert trainer.configure(key).held_out is held_out


def test_p_counts_the_earlier_test_too(ledger):
    """Six comparisons were planned before the eight of this test; each further one counts too."""
    runner = Runner(ledger, train)
    other_data.run_tuning(runner)
    other_data.run_tests(ledger, runner)
    alone = find_family(ledger)
    assert (len(alone.leads), alone.to_come) == (8, 6)
    smallest = min(alone.leads, key=lambda found: alone.leads[found].p)
    assert alone.correct()[smallest] == pytest.approx(14 * alone.leads[smallest].p)
    before = {entrant: find_tuned_before(entrant, 512) for entrant in (OURS, "Muon")}
    for entrant in before:
        for seed in range(3):
            runner.run(make_key(EARLIER, entrant, 512, before[entrant], seed))
    assert len(find_family(ledger).leads) == 8 + 1  # not beside the new ones
    earlier = format_scores(ledger, find_family(ledger), unchanged=True).splitlines()[2:]
    assert [line.split(" | ")[1] for line in earlier] == [OURS, "Muon"]
