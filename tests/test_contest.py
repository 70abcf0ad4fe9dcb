"""The rules of the large-batch contest, played with scores from a formula."""

import argparse
import math
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import ledger as ledger_module
import pytest
from contest import ENTRANTS, Search, Tuning
from contest_summary import summary
from contest_table import everything_tested, written
from large_batch import BATCHES, Contest, Trainer
from ledger import Key, Ledger, Missing, Setting, claim

MUON = Search("Muon", 8192, 12)
HOLDER = """
import sys, time
from ledger import Key, Setting, claim
from pathlib import Path
with claim(Path(sys.argv[1]), eval(sys.argv[2])) as ours:
    print(ours, flush=True)
    time.sleep(60)
"""


def landscape(best_lr, slope=1.0, decay=2.0, momentum=0.6):
    """90 % at best_lr, that much less an octave away, and for what else is not best."""

    def score(key):
        octaves = abs(math.log2(key.setting.lr / best_lr))
        wrong = (key.setting.decay != decay) + (key.setting.momentum != momentum)
        return 90 - slope * octaves - wrong

    return score


class Scored(Trainer):
    """Trains nothing: the result is a function of the key."""

    def __init__(self, ledger, arguments, result):
        super().__init__(ledger, arguments)
        self._result, self.trained = result, []

    def _train(self, key):
        self.trained.append(key)
        return self._result(key)


def arguments_for(entrants, share):
    """What the command line would give for batch 8192."""
    given = {"batch": [8192], "entrants": entrants, "share": share, "seconds": 60.0}
    return argparse.Namespace(**given, epochs=None, once=False, first_seed=0, seeds=3, setting=None)


@pytest.mark.parametrize("octaves", [-5, -1, 0, 1, 4])
def test_the_search_widens_until_the_best_is_bracketed(octaves):
    best_lr = ENTRANTS["Muon"].lr * 2.0**octaves
    asked = []

    def score(key):
        asked.append(key.setting.lr)
        return landscape(best_lr)(key)

    assert MUON.best(score) == Setting(best_lr, 2.0, 0.6)
    assert min(asked) < best_lr < max(asked)
    assert {lr / best_lr for lr in asked} <= {2.0**k for k in range(-12, 12)}


@pytest.mark.parametrize("side", [-1, 1])
def test_the_search_goes_on_past_a_tie(side):
    """Two rates that are equally good are bracketed together, and the first one is taken."""
    middle = ENTRANTS["Muon"].lr
    asked = []

    def score(key):
        asked.append(key.setting.lr)
        return landscape(middle * 2.0 ** (side / 2))(key)

    assert MUON.best(score) == Setting(middle, 2.0, 0.6)
    assert middle * 2.0 ** (2 * side) in asked


def test_every_batch_begins_at_the_same_learning_rates():
    middle = ENTRANTS["AdamW"].lr
    for batch in BATCHES:
        begun = {key.setting.lr for key in Search("AdamW", batch, 12).beginning()}
        assert begun == {middle / 2, middle, middle * 2}


@pytest.mark.parametrize(("batch", "full"), [(512, 12), (2048, 12), (8192, 29), (16384, 36)])
def test_full_length_is_for_large_batches(batch, full, tmp_path):
    ledger, arguments = Ledger(tmp_path / "runs.jsonl", {}), arguments_for(["Muon"], None)
    tuning = Contest(ledger, None, arguments).tuning(batch)
    assert tuning.full == full


def test_contenders_are_tuned_again_at_full_length():
    """Twice as long wants twice the rate; LAMB is too far behind, LARS has not been searched, and
    ours are far ahead."""
    tops = {"Muon": 0.5, "AdamW": 0.0, "LAMB": -0.1, "Neumann spectral": 9.0}
    asked = set()

    def score(key):
        if key.entrant not in tops:
            raise Missing
        asked.add(key)
        entrant = ENTRANTS[key.entrant]
        best_lr = entrant.lr * key.epochs / 12
        found = landscape(best_lr, decay=entrant.decays[0], momentum=0.9)(key)
        return found + tops[key.entrant]

    tuning = Tuning(score, 8192, 12, 24)
    lrs = {name: tuning.chosen(name).setting.lr / ENTRANTS[name].lr for name in tops}
    assert lrs == {"Muon": 2.0, "AdamW": 2.0, "LAMB": 1.0, "Neumann spectral": 2.0}
    assert {(key.epochs, key.setting.momentum) for key in asked} == {
        (12, 0.6),
        (12, 0.9),
        (24, 0.9),
    }
    assert {key.setting.decay for key in asked if key.entrant == "Muon" and key.epochs == 24} == {
        *ENTRANTS["Muon"].decays
    }
    assert {key.entrant for key in asked if key.epochs == 24} == set(tops) - {"LAMB"}
    with pytest.raises(Missing):
        tuning.chosen("LARS")
    same = Tuning(score, 16384, 24, 24)
    assert not any(map(same.contends, tops))


def test_transfer_retunes_the_learning_rate_alone():
    asked = set()

    def score(key):
        asked.add((key.model, key.setting.decay, key.setting.momentum))
        return landscape(0.02)(key)

    search = Search("Muon", 8192, 12, "resnet18")
    assert search.transferred(score, Setting(0.04, 0.1, 0.9)) == Setting(0.02, 0.1, 0.9)
    assert asked == {("resnet18", 0.1, 0.9)}


@pytest.mark.parametrize(("slope", "octaves"), [(1.0, 2.0), (0.5, 4.0), (0.9, 2.0), (3.0, 0.0)])
def test_the_width_is_that_of_the_hill(slope, octaves):
    """Within a point of the top are 2/slope octaves, of which the grid sees those in ratio √2."""
    low, high = MUON.width(landscape(0.08, slope), Setting(0.04, 2.0, 0.6))
    assert math.log2(high / low) == octaves
    assert math.sqrt(low * high) == pytest.approx(0.08)


def test_the_book_can_be_shared(tmp_path):
    path = tmp_path / "runs.jsonl"
    ours, theirs = Ledger(path, {"commit": "a"}), Ledger(path, {"commit": "b"})
    key = MUON.key(0, 2.0, 0.6)
    with pytest.raises(Missing):
        theirs.score(key)
    ours.add(key, {"accuracy": 80.0, "recalibrated": 91.0})
    theirs.refresh()
    assert theirs.score(key) == Ledger(path, {}).score(key) == 91.0
    assert theirs.runs[key]["commit"] == "a"


def test_what_is_claimed_is_ours_until_we_are_done(tmp_path):
    def claimed(batch=8192):
        return claim(tmp_path / "share", ("search", "Muon", batch))

    with claimed() as ours, claimed() as theirs, claimed(512) as other:
        assert (ours, theirs, other) == (True, False, True)
    with claimed() as again, claim(None, "x") as alone, claim(None, "x") as alone_too:
        assert (again, alone, alone_too) == (True, True, True)


def test_nobody_waits_for_a_process_that_died(tmp_path):
    """It had claimed a run; the others take it over."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), repr(MUON.key(0, 2.0, 0.6))],
        stdout=subprocess.PIPE,
        cwd=Path(ledger_module.__file__).parent,
    )
    assert holder.stdout.readline() == b"True\n"
    trainer = Scored(
        Ledger(tmp_path / "runs.jsonl", {}),
        arguments_for(["Muon"], tmp_path),
        lambda key: {"accuracy": 1.0, "recalibrated": None},
    )
    trainer.take(MUON.key(0, 2.0, 0.6))
    assert not trainer.trained
    holder.kill()
    holder.communicate()
    assert trainer.score(MUON.key(0, 2.0, 0.6)) == 1.0


def test_processes_share_a_search_run_by_run(tmp_path):
    """Two at once: every run is trained once, the search gets to its end, and both took part."""
    best_lr = ENTRANTS["Muon"].lr * 8
    arguments = arguments_for(["Muon", "LAMB"], tmp_path / "share")

    def result(key):
        time.sleep(0.01)
        return {"accuracy": landscape(best_lr)(key), "recalibrated": None}

    def take_part():
        ledger = Ledger(tmp_path / "runs.jsonl", {})
        trainer = Scored(ledger, arguments, result)
        Contest(ledger, trainer, arguments).run("search")
        return trainer.trained

    with ThreadPoolExecutor() as pool:
        ours, theirs = (done.result() for done in [pool.submit(take_part) for _ in range(2)])
    assert ours
    assert theirs
    assert len(ours + theirs) == len({*ours, *theirs})
    found = MUON.best(Ledger(tmp_path / "runs.jsonl", {}).score)
    assert found == Setting(best_lr, 2.0, 0.6)


def test_the_whole_contest(tmp_path):
    """All stages in turn: nothing is missing in the table, and nothing is trained twice."""

    def result(key):
        entrant = ENTRANTS[key.entrant]
        factor = 2.0 if key.model == "resnet18" else 1.0
        found = landscape(entrant.lr * factor, decay=entrant.decays[1])(key) + key.seed / 10
        return {"accuracy": 1.0, "recalibrated": found, "seconds": 2.0, "steps_to_target": 9}

    arguments = arguments_for(["Muon", "Neumann spectral"], None)
    ledger = Ledger(tmp_path / "runs.jsonl", {})
    trainer = Scored(ledger, arguments, result)
    contest = Contest(ledger, trainer, arguments)
    trained = trainer.trained
    for stage in ("search", "retune", "final", "range", "transfer", "time"):
        before = len(trained)
        contest.run(stage)
        assert len(trained) > before
    assert len(trained) == len(set(trained))
    here = summary(ledger, contest.tuning(8192))
    there = summary(ledger, contest.tuning(8192), "resnet18")
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


def test_the_table_compares_with_the_peer_that_was_best_held_out(tmp_path):
    """LAMB is better when tested, but Muon was picked; of the seeds only common ones are paired."""
    ledger = Ledger(tmp_path / "runs.jsonl", {})
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

        setting = Search(name, 8192, 12).best(score)
        Search(name, 8192, 12).width(score, setting)
        for seed, value in enumerate(scores):
            key = Key("final", "resnet9", 8192, 24, name, setting, seed)
            result = {"accuracy": 50.0, "recalibrated": value, "steps": 144}
            ledger.add(key, {**result, "steps_to_target": None if seed else 100})
        key = Key("time", "resnet9", 8192, 4, name, setting)
        ledger.add(key, {"accuracy": 50.0, "recalibrated": 1.0, "seconds": 2.0})
    found = summary(ledger, tuning)
    assert found["best_peer"] == "Muon"
    rows = {row["entrant"]: row for row in found["rows"]}
    assert set(rows) == set(scored)
    difference = rows["Neumann spectral"]["difference"]
    assert difference["mean"] == pytest.approx(0.6)
    assert difference["n"] == 2
    assert rows["Muon"]["difference"] is None
    assert rows["Muon"]["seconds"] == 12.0
    assert rows["Muon"]["range"]["octaves"] == 2.0
    assert rows["Muon"]["steps_to_target"] is None
    later = {row["entrant"]: row for row in summary(ledger, tuning, first_seed=1)["rows"]}
    assert later["Neumann spectral"]["difference"]["mean"] == pytest.approx(0.7)
    text = written({"resnet9": [found], "resnet18": [summary(ledger, tuning, "resnet18")]})
    assert "| Muon | 0.04, 0.5, 0.6 | 90.00 | 91.00 ± 12.71 | 2 |" in text
    assert "resnet18" not in text


def test_a_setting_that_was_not_chosen_can_be_tested(tmp_path):
    """Before the search is over, too."""
    arguments = arguments_for(["Muon"], None)
    arguments.setting, arguments.first_seed = [0.01, 0.5, 0.6], 10
    ledger = Ledger(tmp_path / "runs.jsonl", {})
    trainer = Scored(ledger, arguments, lambda key: {"accuracy": 1.0, "recalibrated": None})
    Contest(ledger, trainer, arguments).run("final")
    wanted = Key("final", "resnet9", 8192, 24, "Muon", Setting(0.01, 0.5, 0.6))
    assert trainer.trained == [replace(wanted, seed=seed) for seed in (10, 11, 12)]
    assert list(ledger.seeds(wanted)) == [10, 11, 12]


def test_every_setting_that_was_tested_is_listed(tmp_path):
    """Also what a later search would not choose."""
    ledger = Ledger(tmp_path / "runs.jsonl", {})
    for lr, scores in ((0.04, [90.0, 92.0]), (0.3, [80.0])):
        for seed, value in enumerate(scores):
            key = Key("final", "resnet9", 8192, 24, "Muon", Setting(lr, 0.7, 0.6), seed)
            loss = 0.1 * (1 + seed)
            ledger.add(key, {"accuracy": 50.0, "recalibrated": value, "train_loss": loss})
    ledger.add(MUON.key(0, 2.0, 0.6), {"accuracy": 50.0, "recalibrated": 99.0})
    assert everything_tested(ledger).splitlines()[2:] == [
        "| resnet9 | 8192 | Muon | 0.04, 0.7, 0.6 | 91.00 ± 12.71 | 2 | 50.00 | 0.150 |",
        "| resnet9 | 8192 | Muon | 0.3, 0.7, 0.6 | 80.00 | 1 | 50.00 | 0.100 |",
    ]
