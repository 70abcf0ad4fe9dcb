"""The stages of the language contest: which runs they need, on invented losses."""

import json
from dataclasses import replace

import pytest

from benchmarks.common.ledger import Ledger, MissingRunError, Runner
from benchmarks.language.contest_rules import (
    MIDDLE,
    OURS,
    ROWS,
    TESTED_FIRST,
    make_key,
)
from benchmarks.language.contest_stages import LanguageContest
from benchmarks.language.contest_tables import format_contest
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


@pytest.mark.parametrize("stage", ["test", "saving"])
def test_an_interrupted_stage_leaves_complete_pairs(tmp_path, stage):
    """Seed by seed. The batches that the goal asks for come first, what is descriptive last."""
    order = []

    def train(key):
        order.append(key)
        return invent(key)

    contest = run_stages(tmp_path, train, (stage,))
    trained = [key for key in order if key.stage == stage]
    assert list(dict.fromkeys(key.tokens_per_step for key in trained)) == [*TESTED_FIRST]
    seeds = range(101, 111) if stage == "test" else range(101, 106)
    first = trained[: 4 * len(seeds)]  # two settings of ours and two of the peer; four lengths
    assert [key.seed for key in first] == [seed for seed in seeds for _ in range(4)]
    assert {key.tokens_per_step for key in first} == {MIDDLE}
    arms = {OURS, contest.find_peer(MIDDLE, 200)} if stage == "test" else {OURS}
    assert {key.setting.arm for key in first[:4]} == arms
    if stage == "test":
        assert {key.seed for key in trained[-5:]} == {105}  # the others, one run of each


def test_an_arm_that_always_diverges_does_not_hold_up_the_contest(tmp_path):
    def train(key):
        lost = key.setting.arm in ("paper", "muon")
        return {**invent(key), "loss": None} if lost else invent(key)

    contest = run_stages(tmp_path, train)
    assert contest.searches.find_muon() == "muon by norm"
    assert not [k for k in contest.ledger.runs if k.stage == "test" and k.setting.arm == "paper"]
    (row,) = (line for line in format_contest(contest).splitlines() if "| Neumann (paper)" in line)
    assert "diverged" in row
