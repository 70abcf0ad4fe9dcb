"""What the language contest concludes from its runs, on invented losses."""

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from benchmarks.common.ledger import Ledger, MissingRunError, Runner
from benchmarks.language import contest_tables, contest_verdicts
from benchmarks.language.contest_rules import LENGTHS, MIDDLE, MUON, OTHERS, OURS, make_key
from benchmarks.language.contest_stages import LanguageContest
from benchmarks.language.contest_tables import (
    EARLIER,
    NAMES,
    OUR_LEAD,
    describe_verdict,
    format_contest,
)
from benchmarks.language.contest_verdicts import (
    Saving,
    Verdict,
    choose_compared,
    compare_finalists,
    estimate_saving,
)
from benchmarks.language.language_runs import RunKey
from benchmarks.language.search_space import choose_start, get_grids, make_setting
from neumann.lab.studies.statistics import Difference
from tests.support.language_scores import invent, run_stages

pytestmark = pytest.mark.slow


def test_the_lead_is_that_of_our_worse_over_their_better_setting(contest):
    found = compare_finalists(contest, MIDDLE, 200)
    assert found.n == 10
    assert 0.0 < found.mean < 0.051
    assert found.p < 1e-4
    means = [
        fmean(contest.find_losses("test", MIDDLE, 200, setting).values())
        for setting in choose_compared(contest, MIDDLE, 200)
    ]
    assert found.mean == pytest.approx(means[1] - means[0])
    table = format_contest(contest)
    assert f"| {means[0]:.4f} (n 10) | " in table
    assert "Muon (by norm)" in table
    assert "| 1,048,576 × 50 |" in table


def test_verdicts_in_words(contest):
    sentences = [line for line in format_contest(contest).splitlines() if line.startswith("At ")]
    assert len(sentences) == 5
    for sentence, (batch, steps) in zip(sentences, LENGTHS.items(), strict=False):
        assert sentence.startswith(
            f"At {batch:,} tokens per step and {steps} steps, our worse setting"
        )
        assert "is ahead of the better one of Muon (by norm) by 0.0" in sentence
        assert "(n 10, 95 % interval +0.0" in sentence
        assert "corrected p" in sentence
        assert "% are saved (95 % interval" in sentence
    assert "ours is ahead of NorMuon (by norm) by 0." in sentences[3]  # the longer run
    assert "descriptive, p" in sentences[3]


def test_words_for_other_outcomes():
    def describe(mean, p, saving=None):
        lead = Difference(mean, mean - 0.01, mean + 0.01, p, 10)
        return describe_verdict(Verdict(65_536, 800, "soap", lead, p, True, saving))

    behind = describe(-0.03, 0.01, Saving(-0.04, -0.05, -0.03, 0.2, 10))
    assert "is behind the better one of SOAP by 0.0300 nats" in behind
    assert "needs 4.0 % more steps for the peer's loss (95 % interval 3.0 to 5.0 %" in behind
    assert "not significant" not in behind
    assert "not significant" in describe(0.003, 0.4)
    least = describe(0.1, 1e-6, Saving(0.2, 0.05, 0.2, 0.2, 10))
    assert "saves 20 % of the steps or more (95 % interval from 5.0 %, n 10)." in least
    assert "15.0 to 20.0 % or more" in describe(0.1, 1e-6, Saving(0.18, 0.15, 0.2, 0.2, 10))


def test_a_saving_counts_the_steps_that_were_run(contest, monkeypatch):
    """95 % of 50 steps are 48, so the share is 0.96."""
    shares = []

    def estimate(lengths, target):
        shares.extend(lengths)
        return estimate_saving(lengths, target)

    monkeypatch.setattr(contest_verdicts, "estimate_saving", estimate)
    found = contest_verdicts.find_saving(contest, 1_048_576, 50)
    assert shares == [0.96, 0.9, 1.0]  # behind after 90 %: there is no shorter one
    # 0.5·(1/share − 1) equals the lead of 0.05, up to the noise of the seeds
    assert found.middle == pytest.approx(1 - 1 / 1.1, abs=0.004)
    assert found.n == 5


def test_a_coordinate_bracketed_before_another_moved_is_in_parentheses(tmp_path):
    """The learning rate has worse ones beside it at the start, but not where another one moved."""
    steps, start, rates = LENGTHS[MIDDLE], choose_start(OURS), get_grids(OURS)["lr"]
    index = rates.index(start["lr"])
    points = {2.0: {**start, "slow": 0.3}, 2.1: {**start, "slow": 0.6}}
    points |= {2.2: {**points[2.1], "lr": rates[index - 1]}}
    points |= {2.3: {**points[2.1], "lr": rates[index + 1]}}
    losses = {make_setting(OURS, point, steps): loss for loss, point in points.items()}

    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)
    runner = Runner(ledger, lambda key: invent(key) | {"loss": losses.get(key.setting, 3.0)})
    few = LanguageContest(ledger, runner)
    for arm in (*MUON, *OTHERS):  # a screening
        runner.run(make_key("tune", MIDDLE, steps, make_setting(arm, choose_start(arm)), 0))
    for setting in losses:
        runner.run(make_key("tune", MIDDLE, steps, setting, 0))
    here = few.searches.find_unbracketed(OURS, MIDDLE, steps)
    anywhere = few.searches.find_unbracketed(OURS, MIDDLE, steps, anywhere=True)
    assert set(here) - set(anywhere) == {"lr"}
    assert " (lr), forgetting, output, " in format_contest(few)
    assert EARLIER in format_contest(few)


def test_the_table_of_an_unfinished_screening(tmp_path):
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)
    runner = Runner(ledger, invent)
    contest = LanguageContest(ledger, runner)
    setting = make_setting("adamw", choose_start("adamw"), LENGTHS[MIDDLE])
    runner.run(make_key("tune", MIDDLE, LENGTHS[MIDDLE], setting, 0))
    lines = format_contest(contest).splitlines()
    assert any(line.endswith("| 1 |") for line in lines)
    assert lines[-1].endswith("| AdamW | lr |")


def test_all_tested_settings_are_shown(contest):
    table = format_contest(contest)
    assert "| 262,144 × 200 | AdamW | 1 |" in table
    assert "| 262,144 × 200 | **Neumann spectral** | 2 |" in table


def test_other_arms_stand_beside_our_best_setting(contest):
    """On the seeds that both have, of which ours has more."""
    best = contest.list_finalists(OURS, MIDDLE, 200)[0]
    ours = contest.find_losses("test", MIDDLE, 200, best)
    theirs = contest.find_losses(
        "test", MIDDLE, 200, contest.list_finalists("adamw", MIDDLE, 200)[0]
    )
    lead = fmean(theirs[seed] - ours[seed] for seed in theirs)
    text = contest_tables.make_parts(contest)["tests"]
    (row,) = (line for line in text.splitlines() if "262,144 × 200 | AdamW" in line)
    assert f"| {lead:+.4f} [+0." in row
    for line in text.splitlines():
        if NAMES[OURS] in line:
            assert line.endswith("|  |")  # not beside itself
    assert text.endswith(OUR_LEAD)


def test_a_lead_counts_the_pairs_that_are_left(tmp_path):
    def train(key):
        lost = key.stage == "test" and key.setting.arm == OURS and key.seed == 103
        return {**invent(key), "loss": None} if lost else invent(key)

    text = contest_tables.make_parts(run_stages(tmp_path, train))["tests"]
    (row,) = (line for line in text.splitlines() if "262,144 × 200 | AdamW" in line)
    assert row.endswith("] (n 4) |")


def test_steps_saved():
    """Losses that fall on a straight line: equal to the peer's at 90 % of the length."""
    lengths = {
        share: {seed: 3 - share + 1e-4 * seed for seed in range(5)}
        for share in (0.8, 0.85, 0.9, 0.95, 1.0)
    }
    middle, low, high = estimate_saving(lengths, dict(lengths[0.9]))
    assert middle == pytest.approx(0.1)
    assert low <= middle <= high
    assert high - low < 1e-3
    # Noise may turn the order of two lengths around: then both have their mean, 2.125.
    noisy = {**lengths, 0.85: lengths[0.9], 0.9: lengths[0.85]}
    target = {seed: 2.0625 + 1e-4 * seed for seed in range(5)}  # half way from there to 0.95
    assert estimate_saving(noisy, target)[0] == pytest.approx(1 - 0.9417, abs=1e-3)
    ahead = {seed: loss - 0.05 for seed, loss in lengths[1.0].items()}
    assert estimate_saving(lengths, ahead)[0] == pytest.approx(-0.05)  # on the same line


def test_the_interval_of_a_saving_covers_the_truth(monkeypatch):
    """Of five seeds, as often as it says; without the widening it would be 86 %."""
    monkeypatch.setattr(contest_verdicts, "RESAMPLES", 200)
    draw, covered = np.random.default_rng(0), []
    shares = (0.8, 0.85, 0.9, 0.95, 1.0)
    for number in range(150):
        lengths = {
            share: {seed: 3 - share + 0.02 * draw.standard_normal() for seed in range(5)}
            for share in shares
        }
        target = {seed: 2.1 + 0.02 * draw.standard_normal() for seed in range(5)}
        _, low, high = estimate_saving(lengths, target, number)
        covered.append(low <= 0.1 <= high)
    assert np.mean(covered) >= 0.92


def test_the_goal_is_met_or_missed_in_words(contest):
    verdicts = contest_verdicts.find_verdicts(contest)
    (sentence,) = contest_tables._describe_goal(verdicts)
    assert "It is missed: the lower end of the saving at" in sentence
    saved = Saving(0.15, 0.12, 0.18, 0.2, 5)
    assert contest_verdicts.list_missed_goals([replace(v, saving=saved) for v in verdicts]) == []
    small = min(verdicts, key=lambda v: v.batch)
    behind = replace(small, lead=replace(small.lead, low=-0.006))
    others = [replace(v, saving=saved) for v in verdicts if v is not small]
    (missed,) = contest_verdicts.list_missed_goals([behind, *others])
    assert "at 65,536 tokens per step ours may be behind by more than 0.005" in missed
    assert contest_verdicts.list_missed_goals(others) is None
    lost = replace(small, lead=replace(small.lead, diverged_b=3), saving=saved)
    (missed,) = contest_verdicts.list_missed_goals([lost, *others])
    assert missed == "3 of our runs diverged at 65,536 tokens per step"


def test_a_run_that_diverged_in_the_test_is_counted(tmp_path):
    def train(key):
        lost = key.stage == "test" and key.setting.arm == OURS and key.seed <= 103
        return {**invent(key), "loss": None} if lost else invent(key)

    contest = run_stages(tmp_path, train)
    (verdict, *_) = contest_verdicts.find_verdicts(contest)
    assert (verdict.lead.n, verdict.lead.diverged_b) == (7, 3)
    assert verdict.p == 1.0
    assert "But 3 of our runs diverged, so this does not count." in describe_verdict(verdict)
    assert verdict.saving.n == 2


def test_our_setting_that_always_diverges_is_the_worse_one(tmp_path):
    worse = run_stages(tmp_path, invent, ("screen", "tune")).searches.rank_settings(
        OURS, MIDDLE, 200
    )[1]

    def train(key):
        lost = key.stage == "test" and key.setting == worse and key.tokens_per_step == MIDDLE
        return {**invent(key), "loss": None} if lost else invent(key)

    contest = run_stages(tmp_path, train)
    assert compare_finalists(contest, MIDDLE, 200).mean is None


def test_no_verdict_before_both_settings_are_tested(contest, tmp_path):
    second = contest.searches.rank_settings(OURS, MIDDLE, 200)[1]
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)
    for key, run in contest.ledger.runs.items():
        if not (key.stage == "test" and key.setting == second and key.tokens_per_step == MIDDLE):
            ledger.runs[key] = run
    part = LanguageContest(ledger, Runner(ledger, invent, seconds=0))
    with pytest.raises(MissingRunError):
        compare_finalists(part, MIDDLE, 200)
    # Two of three primary comparisons are left, and the third still counts in the correction.
    verdicts = contest_verdicts.find_verdicts(part)
    smallest = min((v for v in verdicts if v.primary), key=lambda v: v.lead.p)
    assert smallest.p == pytest.approx(3 * smallest.lead.p)
