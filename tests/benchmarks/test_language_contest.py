"""The stages of the language contest: which runs they need, on invented losses."""

import json
import sys
from dataclasses import replace

import pytest

from benchmarks.common.ledger import Ledger, MissingRunError, Runner
from benchmarks.language import contest as contest_command
from benchmarks.language.contest_rules import (
    MIDDLE,
    OURS,
    ROWS,
    TESTED_FIRST,
    make_key,
)
from benchmarks.language.contest_stages import LanguageContest
from benchmarks.language.contest_tables import format_contest
from benchmarks.language.contest_verdicts import find_saving
from benchmarks.language.finalists import Finalists, read_finalists, write_finalists
from benchmarks.language.language_arms import make_default_recipe
from benchmarks.language.language_runs import RunKey
from tests.support.language_scores import invent, invent_loss, run_stages

pytestmark = pytest.mark.slow


def test_finalists_stay_what_they_were_before_the_test(tmp_path):
    """A better setting, or peer, that is found after the test has begun changes nothing."""
    contest = run_stages(tmp_path, invent, ("test",))
    before = contest.list_finalists(OURS, MIDDLE, 200)
    late = replace(before[0], output=0.123)
    contest.ledger.add(make_key("tune", MIDDLE, 200, late, 0), invent_loss(1.0))
    rows = contest.searches.rank_settings(ROWS, MIDDLE, 200)[0]
    contest.ledger.add(make_key("tune", MIDDLE, 200, rows, 0), invent_loss(0.9))
    again = LanguageContest.read(tmp_path / "runs.jsonl")
    assert again.searches.rank_settings(OURS, MIDDLE, 200)[0] == late
    assert again.list_finalists(OURS, MIDDLE, 200) == before
    assert again.find_peer(MIDDLE, 200) == "muon by norm"
    about = json.loads((tmp_path / "runs-finalists.json").read_text())["about"]
    assert about == contest.ledger.origin


def test_finalists_are_written_where_there_are_no_hard_links(tmp_path, monkeypatch):
    def refuse(source, target):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    path = tmp_path / "finalists.json"
    chosen = {(MIDDLE, 200): Finalists("soap", {OURS: (make_default_recipe(200),)})}
    write_finalists(path, chosen, {})
    write_finalists(path, {}, {})  # the first one stays
    assert read_finalists(path) == chosen
    assert list(tmp_path.iterdir()) == [path]


def test_tests_have_fresh_seeds_and_ten_of_them(contest):
    tested = [key for key in contest.ledger.runs if key.stage in ("test", "saving")]
    assert min(key.seed for key in tested) == 101  # lower ones have chosen settings and options
    best = contest.searches.rank_settings(OURS, MIDDLE, 200)[0]
    assert len(contest.find_losses("test", MIDDLE, 200, best)) == 10


def test_the_larger_network_takes_the_settings_along(contest):
    ours, peer = (key for key in contest.ledger.runs if key.model == "gpt:124m")
    assert ours.setting == contest.searches.rank_settings(OURS, MIDDLE, 200)[0]
    assert (peer.setting.arm, peer.steps, peer.seed) == ("muon by norm", 200, 101)
    (sentence,) = (line for line in format_contest(contest).splitlines() if "GPT-2 124M" in line)
    assert "ours is ahead of Muon (by norm) by 0.0" in sentence
    assert "n 1" in sentence


@pytest.mark.parametrize("package", ["pytorch_optimizer", "schedulefree"])
def test_a_missing_package_is_found_before_the_first_run(package, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    words = ["contest", "screen", "--device", "cpu", "--results", str(tmp_path / "runs.jsonl")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match=rf"pip install \"\.\[{package.replace('_', '-')}\]\""):
        contest_command.main()
    assert list(tmp_path.iterdir()) == []


def test_a_contest_without_runs(tmp_path):
    ledger = Ledger(tmp_path / "none.jsonl", RunKey)
    contest = LanguageContest(ledger, Runner(ledger, invent, seconds=0))
    assert format_contest(contest) == ""
    with pytest.raises(MissingRunError):
        contest.searches.find_muon()


def test_the_time_may_run_out(tmp_path):
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)
    contest = LanguageContest(ledger, Runner(ledger, invent, seconds=0))
    with pytest.raises(MissingRunError):
        contest.run("screen")


@pytest.mark.parametrize("stage", ["test", "saving", "124m"])
def test_a_stage_without_all_its_runs_is_not_finished(tmp_path, stage):
    run_stages(tmp_path, invent, ("screen", "tune"))
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)
    late = LanguageContest(ledger, Runner(ledger, invent, seconds=0))
    with pytest.raises(MissingRunError):
        late.run(stage)


def test_nothing_is_tested_before_everything_is_tuned(tmp_path):
    order = []

    def train(key):
        order.append(key.stage)
        return invent(key)

    run_stages(tmp_path, train, ("test",))
    first = order.index("test")
    assert set(order[:first]) == {"tune"}
    assert set(order[first:]) == {"test"}


def test_an_interrupted_test_leaves_complete_pairs(tmp_path):
    """Seed by seed. The batches that the goal asks for come first, what is descriptive last."""
    order = []

    def train(key):
        order.append(key)
        return invent(key)

    contest = run_stages(tmp_path, train, ("test",))
    trained = [key for key in order if key.stage == "test"]
    assert list(dict.fromkeys(key.tokens_per_step for key in trained)) == [*TESTED_FIRST]
    first = trained[:40]  # two settings of ours and two of the peer
    assert [key.seed for key in first] == [seed for seed in range(101, 111) for _ in range(4)]
    assert {key.tokens_per_step for key in first} == {MIDDLE}
    assert {key.setting.arm for key in first[:4]} == {OURS, contest.find_peer(MIDDLE, 200)}
    assert {key.seed for key in trained[-4:]} == {105}  # the others, one run of each
    assert {key.setting.arm for key in trained[-4:]} == {ROWS, "normuon", "soap", "adamw"}


@pytest.mark.parametrize(
    ("late", "trained"),
    [
        ((), [190, 180]),  # all seeds are behind the peer after 90 % of the steps
        ((0.90,), [190, 180, 170]),  # one seed is ahead there
        ((0.90, 0.85, 0.80), [190, 180, 170, 160]),
    ],
)
def test_shorter_runs_end_at_the_first_length_that_is_short_enough(tmp_path, late, trained):
    def train(key):
        share = round(key.steps / 200, 2)
        ahead = key.stage == "saving" and key.seed == 103 and share in late
        return invent_loss(1.0) if ahead else invent(key)

    contest = run_stages(tmp_path, train)
    found = [key for key in contest.ledger.runs if key.stage == "saving"]
    middle = [key for key in found if key.tokens_per_step == MIDDLE]
    assert [key.steps for key in middle] == [steps for steps in trained for _ in range(5)]
    assert [key.seed for key in middle[:5]] == [*range(101, 106)]
    assert [len(keys) for keys in contest.list_shorter(MIDDLE)] == [5] * len(trained)


def test_an_interrupted_saving_goes_on_and_says_nothing_before(tmp_path):
    def train(key):
        if key.stage == "saving" and key.steps == 180 and key.seed == 104:
            raise KeyboardInterrupt
        return invent(key)

    with pytest.raises(KeyboardInterrupt):
        run_stages(tmp_path, train)
    begun = LanguageContest.read(tmp_path / "runs.jsonl")
    assert find_saving(begun, MIDDLE, 200) is None
    assert [keys[0].steps for keys in begun.list_shorter(MIDDLE)] == [190, 180]
    assert find_saving(run_stages(tmp_path, invent), MIDDLE, 200).n == 5


def test_an_arm_that_always_diverges_does_not_hold_up_the_contest(tmp_path):
    def train(key):
        lost = key.setting.arm in ("paper", "muon")
        return {**invent(key), "loss": None} if lost else invent(key)

    contest = run_stages(tmp_path, train)
    assert contest.searches.find_muon() == "muon by norm"
    assert not [k for k in contest.ledger.runs if k.stage == "test" and k.setting.arm == "paper"]
    (row,) = (line for line in format_contest(contest).splitlines() if "| Neumann (paper)" in line)
    assert "diverged" in row
