"""The stages of the large-batch contest and their summary, without any training."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from benchmarks.contest.entrants import ENTRANTS, ContestLedger, RunKey, Setting
from benchmarks.contest.image_families import find_cifar10
from benchmarks.contest.markdown_tables import format_summaries, format_tested
from benchmarks.contest.summary import summarize
from benchmarks.contest.tuning import Search, Tuning
from tests.support.contest_scores import MUON, FakeContest, landscape


def test_processes_share_a_search_run_by_run(tmp_path):
    """Two at once train every run once, finish the search, and both take part."""
    best_lr = ENTRANTS["Muon"].lr * 8
    path, share = tmp_path / "runs.jsonl", tmp_path / "share"

    def result(key):
        time.sleep(0.01)
        return {"accuracy": landscape(best_lr)(key), "recalibrated": None}

    def take_part():
        fake = FakeContest(path, result, share=share, entrants=("Muon", "LAMB"))
        fake.contest.run("search")
        return fake.trained

    with ThreadPoolExecutor() as pool:
        ours, theirs = (done.result() for done in [pool.submit(take_part) for _ in range(2)])
    assert ours
    assert theirs
    assert len(ours + theirs) == len({*ours, *theirs})
    assert MUON.find_best(ContestLedger(path).score) == Setting(best_lr, 2.0, 0.6)


def test_all_stages(tmp_path):
    """After all stages the table is complete, and no run was trained twice."""

    def result(key):
        entrant = ENTRANTS[key.entrant]
        factor = 2.0 if key.model == "resnet18" else 1.0
        found = landscape(entrant.lr * factor, decay=entrant.decays[1])(key) + key.seed / 10
        return {"accuracy": 1.0, "recalibrated": found, "seconds": 2.0}

    fake = FakeContest(tmp_path / "runs.jsonl", result, entrants=("Muon", "Neumann spectral"))
    ledger, contest, trained = fake.ledger, fake.contest, fake.trained
    for stage in ("search", "retune", "final", "range", "transfer", "time"):
        before = len(trained)
        contest.run(stage)
        assert len(trained) > before
    assert len(trained) == len(set(trained))
    here = summarize(ledger, contest.tuning(8192))
    there = summarize(ledger, contest.tuning(8192), "resnet18")
    for part, factor in ((here, 1.0), (there, 2.0)):
        assert part["best_peer"] == "Muon"
        for row in part["rows"]:
            entrant = ENTRANTS[row["entrant"]]
            assert row["setting"] == {
                "lr": entrant.lr * factor,
                "decay": entrant.decays[1],
                "momentum": 0.6,
            }
            assert row["interval"]["n"] == 3
    assert all(row["range"]["octaves"] == 2.0 for row in here["rows"])
    assert all(row["seconds"] == 12.0 for row in here["rows"])
    assert here["rows"][0]["held_out_epochs"] == 29


def test_comparison_is_with_the_best_peer_on_held_out_images(tmp_path):
    """LAMB is better on the test set, but Muon was picked. Only common seeds are paired."""
    ledger = ContestLedger(tmp_path / "runs.jsonl")
    scored = {"Muon": [90.0, 92.0], "LAMB": [95.0, 95.5], "Neumann spectral": [90.5, 92.7, 10.0]}
    tops = {"Muon": 0.0, "LAMB": -3.0, "Neumann spectral": -5.0}

    tuning = Tuning(ledger.score, 8192, 12, 12)
    for name, scores in scored.items():
        entrant = ENTRANTS[name]

        def score(key, name=name, entrant=entrant):
            found = landscape(entrant.lr, decay=entrant.decays[0])(key) + tops[name]
            if key not in ledger.runs:
                ledger.add(key, {"accuracy": 1.0, "recalibrated": found})
            return found

        setting = Search(name, 8192, 12).find_best(score)
        Search(name, 8192, 12).find_lr_range(score, setting)
        for seed, value in enumerate(scores):
            key = RunKey("final", "resnet9", 8192, 24, name, setting, seed)
            result = {"accuracy": 50.0, "recalibrated": value, "steps": 144}
            ledger.add(key, result)
        key = RunKey("time", "resnet9", 8192, 4, name, setting)
        ledger.add(key, {"accuracy": 50.0, "recalibrated": 1.0, "seconds": 2.0})
    found = summarize(ledger, tuning)
    assert found["best_peer"] == "Muon"
    rows = {row["entrant"]: row for row in found["rows"]}
    assert set(rows) == set(scored)
    difference = rows["Neumann spectral"]["difference"]
    assert difference["mean"] == pytest.approx(0.6)
    assert difference["n"] == 2
    assert rows["Muon"]["difference"] is None
    assert rows["Muon"]["seconds"] == 12.0
    assert rows["Muon"]["range"]["octaves"] == 2.0
    later = {row["entrant"]: row for row in summarize(ledger, tuning, first_seed=1)["rows"]}
    assert later["Neumann spectral"]["difference"]["mean"] == pytest.approx(0.7)
    family = find_cifar10(ledger, ContestLedger(tmp_path / "none.jsonl"))
    assert len(family) == 2
    tables = {"resnet9": [found], "resnet18": [summarize(ledger, tuning, "resnet18")]}
    text = format_summaries(tables, family.correct())
    lower, higher = sorted(row["difference"]["p"] for row in found["rows"] if row["difference"])
    for p in (2 * lower, max(2 * lower, higher)):
        assert f" | {p:.2g} |" in text
    assert "p (Holm)" not in format_summaries(tables)
    assert "| Muon | 0.04, 0.5, 0.6 | 90.00 | 91.00 ± 12.71 | 2 |" in text
    assert "resnet18" not in text


def test_any_setting_can_be_tested(tmp_path):
    """Even before the search is finished."""
    fake = FakeContest(
        tmp_path / "runs.jsonl",
        lambda key: {"accuracy": 1.0, "recalibrated": None},
        entrants=("Muon",),
        setting=Setting(0.01, 0.5, 0.6),
        first_seed=10,
    )
    fake.contest.run("final")
    wanted = RunKey("final", "resnet9", 8192, 24, "Muon", Setting(0.01, 0.5, 0.6))
    assert fake.trained == [replace(wanted, seed=seed) for seed in (10, 11, 12)]
    assert list(fake.ledger.find_seeds(wanted)) == [10, 11, 12]


def test_all_tested_settings_are_listed(tmp_path):
    """Including those that a later search would not choose."""
    ledger = ContestLedger(tmp_path / "runs.jsonl")
    for lr, scores in ((0.04, [90.0, 92.0]), (0.3, [80.0])):
        for seed, value in enumerate(scores):
            key = RunKey("final", "resnet9", 8192, 24, "Muon", Setting(lr, 0.7, 0.6), seed)
            loss = 0.1 * (1 + seed)
            ledger.add(key, {"accuracy": 50.0, "recalibrated": value, "train_loss": loss})
    ledger.add(MUON.start_keys()[1], {"accuracy": 50.0, "recalibrated": 99.0})
    assert format_tested(ledger).splitlines()[2:] == [
        "| resnet9 | 8192 | Muon | 0.04, 0.7, 0.6 | 91.00 ± 12.71 | 2 | 50.00 | 0.150 |",
        "| resnet9 | 8192 | Muon | 0.3, 0.7, 0.6 | 80.00 | 1 | 50.00 | 0.100 |",
        "",
        "2 settings, 3 runs",
    ]
