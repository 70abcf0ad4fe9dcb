"""The searches of the language contest, on invented losses and on the published runs."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common.ledger import Ledger, Runner
from benchmarks.language import contest_rules
from benchmarks.language.contest_rules import (
    COORDINATES,
    LENGTHS,
    LONGER,
    MIDDLE,
    OURS,
    ROWS,
    make_key,
)
from benchmarks.language.contest_stages import RESULTS, LanguageContest
from benchmarks.language.contest_tables import format_contest
from benchmarks.language.language_arms import make_default_recipe
from benchmarks.language.language_runs import RunKey
from benchmarks.language.search_space import (
    RECIPE,
    choose_start,
    find_point,
    get_grids,
    make_setting,
)
from tests.support.language_scores import invent, invent_loss, run_stages

pytestmark = pytest.mark.slow


def test_the_best_of_each_kind_goes_on(contest):
    assert contest.searches.find_muon() == "muon by norm"
    assert contest.searches.find_other() == "soap"
    assert all(contest.find_peer(*length) == "muon by norm" for length in LENGTHS.items())
    best = contest.searches.rank_settings(OURS, MIDDLE, 200)[0]
    assert best.lr == 0.0075  # the grid's nearest to the bottom of the bowl


def test_every_finalist_gets_as_many_runs(contest):
    """The runs of the screening are among those at the middle batch."""
    keys = [key for key in contest.ledger.runs if key.stage == "tune"]
    counts = Counter((key.tokens_per_step, key.steps, key.setting.arm) for key in keys)
    for batch, steps in LENGTHS.items():
        for arm in (OURS, "muon by norm"):
            assert counts[batch, steps, arm] == contest_rules.RUNS[batch], (batch, arm)
        searched = contest_rules.RUNS[batch] if batch == MIDDLE else 0
        assert counts[batch, steps, "soap"] == searched  # the best other peer
    assert counts[MIDDLE, 200, ROWS] == counts[1_048_576, 50, ROWS] == 16
    assert 3 <= counts[65_536, 800, ROWS] <= contest_rules.RUNS_OF_RATE


def test_rows_are_tried_at_the_best_setting_of_muon(contest):
    """With the same rates of embeddings and output layer, momenta and decay per run."""
    for batch, steps in LENGTHS.items():
        best = contest.searches.rank_settings("muon by norm", batch, steps)[0]
        start = find_point(best, steps, fine=True)
        tried = [
            find_point(s, steps, fine=True)
            for s in contest.searches.rank_settings(ROWS, batch, steps)
        ]
        around = [point for point in tried if {**point, "lr": 0} == {**start, "lr": 0}]
        assert start in around
        assert len(around) >= 3
        if (batch, steps) not in contest_rules.RUNS_OF_ROWS:
            assert tried == around


def test_rows_then_get_a_search_of_their_own(contest):
    """What it did not get to is named, also where the learning rate alone has moved."""
    steps, others = LENGTHS[MIDDLE], {*COORDINATES} - {"lr", "decay", "momentum"}
    found = contest.searches.rank_settings(ROWS, MIDDLE, steps)
    points = [find_point(setting, steps, fine=True) for setting in found]
    moved = {name for name in others if len({point[name] for point in points}) > 1}
    assert moved == others
    assert set(contest.searches.find_unbracketed(ROWS, 65_536, 800)) == others
    assert contest.searches.find_unbracketed(ROWS, *LONGER) == []


def test_the_search_of_rows_continues_after_an_interruption(tmp_path):
    started = Counter()

    def train(key):
        started[key.setting.arm] += 1
        if started[ROWS] == 15:  # within the search, or the one at the other batch
            raise KeyboardInterrupt
        return invent(key)

    with pytest.raises(KeyboardInterrupt):
        run_stages(tmp_path, train, ("tune",))
    contest = run_stages(tmp_path, invent, ("tune",))
    for length in contest_rules.RUNS_OF_ROWS:
        assert len(contest.searches.rank_settings(ROWS, *length)) == 16


def tune_around_a_better_setting(tmp_path, arm, output):
    """The contest after its searches knew a better setting of an arm at 262,144, and its point."""
    contest = run_stages(tmp_path, invent, ("screen", "tune"))
    steps = LENGTHS[MIDDLE]
    before = contest.searches.rank_settings(arm, MIDDLE, steps)[0]
    better = {**find_point(before, steps, fine=True), "output": output}
    key = make_key("tune", MIDDLE, steps, make_setting(arm, better, steps), 0)
    contest.ledger.add(key, invent_loss(1.5))
    return run_stages(tmp_path, invent, ("tune",)), better


def list_tried(contest, arm, batch, steps, better):
    """The points that differ from this one in their learning rate alone."""
    points = [
        find_point(s, steps, fine=True) for s in contest.searches.rank_settings(arm, batch, steps)
    ]
    return [point for point in points if {**point, "lr": 0} == {**better, "lr": 0}]


def test_when_muon_finds_a_better_setting_its_rows_are_tried_there(tmp_path):
    """The rows that were tried at what was its best before do not count."""
    contest, better = tune_around_a_better_setting(tmp_path, "muon by norm", output=0.256)
    tried = list_tried(contest, ROWS, MIDDLE, LENGTHS[MIDDLE], better)
    assert better in tried
    assert 3 <= len(tried) <= contest_rules.RUNS_OF_RATE


def test_a_search_goes_on_from_the_best_setting_that_is_known(tmp_path):
    """Earlier runs off its path count, and it begins at the best of them."""
    batch, steps = 65_536, LENGTHS[65_536]
    start = choose_start(OURS)
    far = [{**start, "output": scale, "lr": 0.01} for scale in (0.35, 0.7, 180.0)]
    settings = [make_setting(OURS, point, steps) for point in far]

    def train(key):
        return invent(key) | ({"loss": 1.0} if key.setting == settings[0] else {})

    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)
    runner = Runner(ledger, train)
    contest = LanguageContest(ledger, runner)
    for setting in settings:
        runner.run(make_key("tune", batch, steps, setting, 0))
    contest.run("tune")
    ranked = contest.searches.rank_settings(OURS, batch, steps)
    assert len(ranked) == contest_rules.RUNS[batch]
    assert ranked[0] == settings[0]
    assert {*settings, make_setting(OURS, {**far[0], "lr": 0.015}, steps)} <= set(ranked)


def test_a_search_goes_on_with_the_coordinates_it_did_not_get_to(tmp_path, monkeypatch):
    """Not with the learning rate, which was bracketed before another coordinate moved."""
    batch, steps = 65_536, LENGTHS[65_536]
    start = choose_start(OURS)
    rates = [{**start, "lr": lr} for lr in (0.02, 0.03, 0.04)]
    moved = {**start, "output": 90.0}
    known = [make_setting(OURS, point, steps) for point in (*rates, moved)]

    def train(key):
        place = known.index(key.setting) if key.setting in known else None
        return invent(key) | ({} if place is None else {"loss": (1.4, 1.2, 1.4, 1.0)[place]})

    monkeypatch.setitem(contest_rules.RUNS, batch, len(known) + 2)
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)
    runner = Runner(ledger, train)
    contest = LanguageContest(ledger, runner)
    for setting in known:
        runner.run(make_key("tune", batch, steps, setting, 0))
    contest.run("tune")
    new = set(contest.searches.rank_settings(OURS, batch, steps)) - set(known)
    beside = [{**moved, "forgetting": value} for value in (1.25, 3.5)]
    assert new == {make_setting(OURS, point, steps) for point in beside}


def test_peers_are_tuned_as_finely_as_we_are(contest):
    """Muon may have slow momentum too, and learning rates between those of the screening."""
    tuned = {k.setting for k in contest.ledger.runs if k.stage == "tune"}
    muon = [setting for setting in tuned if setting.arm == "muon by norm"]
    assert {setting.slow for setting in muon} >= {0.0, 0.3}
    between = {round(math.log2(setting.lr / 0.064) % 1, 3) for setting in muon}
    assert between == {0.0, 0.5}
    screened = [setting for setting in tuned if setting.arm == "adamw"]
    assert {round(math.log2(setting.lr / 0.001) % 1, 3) for setting in screened} == {0.0}
    assert not any(setting.slow for setting in screened)


def test_other_batches_start_from_the_best_setting_of_the_middle_one(contest):
    muon = "muon by norm"
    best = contest.searches.rank_settings(muon, MIDDLE, 200)[0]
    tuned = {
        (key.tokens_per_step, key.setting)
        for key in contest.ledger.runs
        if key.stage == "tune" and key.setting.arm == muon
    }
    for batch, steps in LENGTHS.items():
        assert (batch, make_setting(muon, find_point(best, 200, fine=True), steps)) in tuned
    assert {setting.power for _, setting in tuned} > {0.7}  # it is tuned, too


def test_twice_the_length_is_tuned_in_few_runs_and_tested_once(contest):
    """From the best setting at half the length, with the same lr · decay · steps.

    NorMuon's rows on Muon's steps stand for Muon.
    """
    length = LONGER
    tuned = [
        key.setting
        for key in contest.ledger.runs
        if key.stage == "tune" and (key.tokens_per_step, key.steps) == length
    ]
    counts = Counter(setting.arm for setting in tuned)
    assert set(counts) == {OURS, ROWS}
    assert all(3 <= count <= contest_rules.RUNS_OF_RATE for count in counts.values())
    for arm in (OURS, ROWS):
        half = contest.searches.rank_settings(arm, MIDDLE, 200)[0]
        first = next(setting for setting in tuned if setting.arm == arm)
        double = replace(first, decay=2 * first.decay)
        assert double == replace(half, decay=pytest.approx(half.decay))
    (finalist,) = contest.list_finalists(OURS, *length)
    assert len(contest.find_losses("test", *length, finalist)) == 5


def test_when_half_the_length_finds_a_better_setting_twice_the_length_tries_it(tmp_path):
    """Only the learning rate moves there, so the other coordinates come from half the length."""
    contest, better = tune_around_a_better_setting(tmp_path, OURS, output=180.0)
    tried = list_tried(contest, OURS, *LONGER, better)
    assert better in tried
    assert 3 <= len(tried) <= contest_rules.RUNS_OF_RATE


def test_the_table_names_what_is_not_bracketed(contest):
    """Every grid has a worse value on both sides of the best, or the search has not tried it."""
    (arm, *length), steps = (OURS, MIDDLE), LENGTHS[MIDDLE]
    found = contest.searches.find_unbracketed(arm, *length, steps)
    best = contest.searches.rank_settings(arm, *length, steps)[0]
    point = find_point(best, steps, fine=True)
    tried = {
        name: {
            find_point(key.setting, steps, fine=True)[name]
            for key in contest.ledger.runs
            if key.stage == "tune" and (key.setting.arm, key.tokens_per_step) == (arm, MIDDLE)
            and {**find_point(key.setting, steps, fine=True), name: 0} == {**point, name: 0}
        }
        for name in COORDINATES if name in point
    }  # fmt: skip
    for name, values in tried.items():
        enclosed = min(values) < point[name] < max(values)
        assert (name in found) is not enclosed, name
    assert (
        contest.searches.find_unbracketed("adamw", MIDDLE, steps) == []
    )  # its screening moves lr alone
    assert "| not bracketed |" in format_contest(contest)


@pytest.fixture(scope="module")
def published():
    return LanguageContest.read(Path(__file__).parents[2] / RESULTS)


def test_no_search_has_ended_at_the_edge_of_a_grid(published):
    """Nor would it if it went on: 0 has nothing below it."""
    for batch, steps in LENGTHS.items():
        for arm in (OURS, published.searches.find_muon(), ROWS):
            best = published.searches.rank_settings(arm, batch, steps)[0]
            point, grids = find_point(best, steps, fine=True), get_grids(arm, fine=True)
            edges = {
                n for n in point if n in COORDINATES and point[n] in (grids[n][0], grids[n][-1])
            }
            assert not {name for name in edges if point[name] != 0}, (arm, batch)


def test_wider_grids_leave_earlier_runs_where_they_were(published):
    """What a search continues from is a run that the ledger has."""
    searched = (OURS, published.searches.find_muon(), published.searches.find_other(), ROWS)
    for key in published.ledger.runs:
        if key.setting.arm in searched:
            again = make_setting(
                key.setting.arm, find_point(key.setting, key.steps, fine=True), key.steps
            )
            assert again == key.setting
    # Adding a value between two others would have moved this one to 0.85.
    decay = 0.96 / (0.032 * 600)
    older = make_setting("muon by norm", choose_start("muon by norm"), 600)
    assert find_point(replace(older, lr=0.032, decay=decay), 600)["forgetting"] == 1.25


def test_starts_suit_the_length_of_a_run():
    for steps in (50, 200, 800):  # lr · decay · steps is the same
        muon = make_setting("muon by norm", choose_start("muon by norm"), steps)
        assert muon.lr * muon.decay * steps == pytest.approx(2.5)
        point = find_point(muon, steps)
        assert point == pytest.approx(choose_start("muon by norm"))
    for steps in (50, 800):
        setting = make_setting(RECIPE, choose_start(RECIPE), steps)
        usual = make_default_recipe(steps)
        assert setting == replace(usual, lr=setting.lr, decay=pytest.approx(usual.decay))
