"""The stages of the language contest, and what they conclude, on invented losses."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.common.ledger import Ledger, MissingRunError, Runner
from benchmarks.language import contest_stages, contest_summary, recipe_untuned
from benchmarks.language.contest_stages import (
    COORDINATES,
    LENGTHS,
    MIDDLE,
    MUON,
    OTHERS,
    OURS,
    STAGES,
    LanguageContest,
)
from benchmarks.language.contest_summary import (
    Saving,
    Verdict,
    compare_finalists,
    describe_verdict,
    estimate_saving,
    format_contest,
)
from benchmarks.language.language_runs import RunKey
from benchmarks.language.search_space import (
    RECIPE,
    choose_start,
    find_point,
    get_grids,
    make_setting,
)
from neumann.lab.studies.statistics import Difference
from tests.support.language_scores import invent

pytestmark = pytest.mark.slow


def test_the_best_of_each_kind_goes_on(contest):
    assert contest.find_muon() == "muon by norm"
    assert contest.find_other() == "soap"
    assert all(contest.find_peer(*length) == "muon by norm" for length in LENGTHS.items())
    best = contest.rank_settings(OURS, MIDDLE, 200)[0]
    assert best.lr == 0.0075  # the grid's nearest to the bottom of the bowl


def count_tuning(contest):
    """The number of tuning runs by tokens per step, steps and arm."""
    keys = [key for key in contest.ledger.runs if key.stage == "tune"]
    return Counter((key.tokens_per_step, key.steps, key.setting.arm) for key in keys)


def test_every_finalist_gets_as_many_runs(contest):
    """The runs of the screening are among those at the middle batch."""
    counts = count_tuning(contest)
    for batch, steps in LENGTHS.items():
        for arm in (OURS, "muon by norm", "soap"):
            assert counts[batch, steps, arm] == contest_stages.RUNS[batch], (batch, arm)


def test_interrupted_searches_continue_at_the_best_setting(contest, tmp_path):
    """However often they stop, an arm gets as many runs and ends no worse than it had been."""
    runs = 0

    def train(key):
        nonlocal runs
        runs += 1
        if runs % 25 == 0:
            raise KeyboardInterrupt
        return invent(key)

    for _ in range(100):
        try:
            again = run_stages(tmp_path, train, ("tune",))
            break
        except KeyboardInterrupt:
            continue
    assert runs > 100  # so it was interrupted several times
    finalists = {OURS, "muon by norm", "soap"}
    of_finalists = [
        {place: n for place, n in count_tuning(each).items() if place[2] in finalists}
        for each in (again, contest)
    ]
    assert of_finalists[0] == of_finalists[1]
    for arm in finalists:
        best, usual = (each.rank_settings(arm, MIDDLE, 200)[0] for each in (again, contest))
        assert best.lr == usual.lr


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
    best = contest.rank_settings("soap", MIDDLE, 200)[0]
    tuned = {
        (key.tokens_per_step, key.setting)
        for key in contest.ledger.runs
        if key.stage == "tune" and key.setting.arm == "soap"
    }
    for batch, steps in LENGTHS.items():
        assert (batch, make_setting("soap", find_point(best, 200, fine=True), steps)) in tuned
    assert {setting.power for _, setting in tuned} > {0.7}  # it is tuned, too


def test_twice_the_length_is_tuned_in_few_runs_and_tested_once(contest):
    """From the best setting at half the length, with the same lr · decay · steps."""
    length = contest_stages.LONGER
    tuned = [
        key.setting
        for key in contest.ledger.runs
        if key.stage == "tune" and (key.tokens_per_step, key.steps) == length
    ]
    counts = Counter(setting.arm for setting in tuned)
    assert len(counts) == 3
    assert all(3 <= count <= contest_stages.RUNS_OF_LONGER for count in counts.values())
    half = contest.rank_settings(OURS, MIDDLE, 200)[0]
    first = next(setting for setting in tuned if setting.arm == OURS)
    assert replace(first, decay=2 * first.decay) == replace(half, decay=pytest.approx(half.decay))
    (finalist,) = contest.list_finalists(OURS, *length)
    assert len(contest.find_losses("test", *length, finalist)) == 5


def test_tests_have_fresh_seeds_and_ten_of_them(contest):
    tested = [key for key in contest.ledger.runs if key.stage in ("test", "saving")]
    assert min(key.seed for key in tested) == 1  # 0 has chosen the settings
    best = contest.rank_settings(OURS, MIDDLE, 200)[0]
    assert len(contest.find_losses("test", MIDDLE, 200, best)) == 10


def test_the_lead_is_that_of_our_worse_over_their_better_setting(contest):
    found = compare_finalists(contest, MIDDLE, 200)
    assert found.n == 10
    assert 0.0 < found.mean < 0.051
    assert found.p < 1e-4
    table = format_contest(contest)
    assert "muon by norm" in table
    assert "| 1,048,576 × 50 |" in table


def test_verdicts_in_words(contest):
    sentences = [line for line in format_contest(contest).splitlines() if line.startswith("At ")]
    assert len(sentences) == 5
    for sentence, (batch, steps) in zip(sentences, LENGTHS.items(), strict=False):
        assert sentence.startswith(
            f"At {batch:,} tokens per step and {steps} steps, our worse setting"
        )
        assert "is ahead of the better one of muon by norm by 0.0" in sentence
        assert "(n 10, 95 % interval +0.0" in sentence
        assert "corrected p" in sentence
        assert "% are saved (95 % interval" in sentence
    assert "ours is ahead of muon by norm by 0.0" in sentences[3]  # the longer run
    assert "descriptive, p" in sentences[3]


def test_the_larger_network_takes_the_settings_along(contest):
    ours, peer = (key for key in contest.ledger.runs if key.model == "gpt:124m")
    assert ours.setting == contest.rank_settings(OURS, MIDDLE, 200)[0]
    assert (peer.setting.arm, peer.steps, peer.seed) == ("muon by norm", 200, 1)
    (sentence,) = (line for line in format_contest(contest).splitlines() if "GPT-2 124M" in line)
    assert "ours is ahead of muon by norm by 0.0" in sentence
    assert "n 1" in sentence


def test_words_for_other_outcomes():
    def describe(mean, p, saving=None):
        lead = Difference(mean, mean - 0.01, mean + 0.01, p, 10)
        return describe_verdict(Verdict(65_536, 800, "soap", lead, p, True, saving))

    behind = describe(-0.03, 0.01, Saving(-0.04, -0.05, -0.03, 0.2, 10))
    assert "is behind the better one of soap by 0.0300 nats" in behind
    assert "needs 4.0 % more steps for the peer's loss (95 % interval 3.0 to 5.0 %" in behind
    assert "within the noise" not in behind
    assert "within the noise" in describe(0.003, 0.4)
    assert "validation loss saves 20 % of the steps or more (n 10)." in describe(
        0.1, 1e-6, Saving(0.2, 0.2, 0.2, 0.2, 10)
    )
    assert "15.0 to 20.0 % or more" in describe(0.1, 1e-6, Saving(0.18, 0.15, 0.2, 0.2, 10))


def test_a_saving_counts_the_steps_that_were_run(contest, monkeypatch):
    """85 % of 50 steps are 42, so the share is 0.84."""
    shares = []

    def estimate(lengths, target):
        shares.extend(lengths)
        return estimate_saving(lengths, target)

    monkeypatch.setattr(contest_summary, "estimate_saving", estimate)
    found = contest_summary.find_saving(contest, 1_048_576, 50)
    assert shares == [0.8, 0.84, 0.9, 0.96, 1.0]
    # 0.5·(1/share − 1) equals the lead of 0.05, up to the noise of the seeds
    assert found.middle == pytest.approx(1 - 1 / 1.1, abs=0.004)
    assert found.n == 5


def test_the_table_names_what_is_not_bracketed(contest):
    """Every grid has a worse value on both sides of the best, or the search has not tried it."""
    (arm, *length), steps = (OURS, MIDDLE), LENGTHS[MIDDLE]
    found = contest.find_unbracketed(arm, *length, steps)
    best = contest.rank_settings(arm, *length, steps)[0]
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
    assert contest.find_unbracketed("adamw", MIDDLE, steps) == []  # its screening moves lr alone
    assert "| not bracketed |" in format_contest(contest)


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
        runner.run(few.make_key("tune", MIDDLE, steps, make_setting(arm, choose_start(arm)), 0))
    for setting in losses:
        runner.run(few.make_key("tune", MIDDLE, steps, setting, 0))
    here = few.find_unbracketed(OURS, MIDDLE, steps)
    anywhere = few.find_unbracketed(OURS, MIDDLE, steps, anywhere=True)
    assert set(here) - set(anywhere) == {"lr"}
    assert " (lr), forgetting, output, " in format_contest(few)
    assert contest_summary.EARLIER in format_contest(few)


def test_the_table_of_an_unfinished_screening(tmp_path):
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)
    runner = Runner(ledger, invent)
    contest = LanguageContest(ledger, runner)
    setting = make_setting("adamw", choose_start("adamw"), LENGTHS[MIDDLE])
    runner.run(contest.make_key("tune", MIDDLE, LENGTHS[MIDDLE], setting, 0))
    assert format_contest(contest).splitlines()[-1].endswith("| 1 | lr |")


def test_all_tested_settings_are_shown(contest):
    table = format_contest(contest)
    assert "| 262,144 × 200 | adamw | 1 |" in table
    assert "| 262,144 × 200 | recipe | 2 |" in table


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
    ahead = {seed: loss - 0.05 for seed, loss in lengths[1.0].items()}
    assert estimate_saving(lengths, ahead)[0] == pytest.approx(-0.05)  # on the same line


def test_a_contest_without_runs(tmp_path):
    ledger = Ledger(tmp_path / "none.jsonl", RunKey)
    contest = LanguageContest(ledger, Runner(ledger, invent, seconds=0))
    assert format_contest(contest) == ""
    with pytest.raises(MissingRunError):
        contest.find_muon()


def test_the_time_may_run_out(tmp_path):
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)
    contest = LanguageContest(ledger, Runner(ledger, invent, seconds=0))
    with pytest.raises(MissingRunError):
        contest.run("screen")


def test_the_recipe_untuned_against_tuned_peers(tmp_path, capsys):
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)

    def lose(key):
        arm = key.setting.arm
        bottom = 2.0 if arm == "recipe" else 1.995 if "muon" in arm else 2.2
        away = abs(math.log2(key.setting.lr / 0.2)) if arm == "adamw" else 0.0  # a long way
        return {"loss": bottom + 0.01 * away + 0.0001 * math.sin(key.seed * len(arm))}

    recipe_untuned.train_all(Runner(ledger, lose))
    tuned = [key for key in ledger.runs if key.stage == "recipe" and key.setting.arm == "adamw"]
    assert len(tuned) == 2 * recipe_untuned.RUNS
    muon = [key for key in ledger.runs if key.stage == "recipe" and "muon" in key.setting.arm]
    assert 2 * recipe_untuned.RUNS < len(muon) <= 4 * recipe_untuned.RUNS
    assert 0.9 in {key.setting.before for key in muon}
    assert not [key for key in ledger.runs if key.stage == "recipe" and key.setting.arm == "recipe"]
    recipe_untuned.print_table(ledger)
    lines = capsys.readouterr().out.splitlines()
    assert sum("not worse" in line for line in lines) == 2 * len(recipe_untuned.PEERS)
    assert "+0.005" in next(line for line in lines if "muon by norm" in line)


def run_stages(folder, train, stages=STAGES):
    ledger = Ledger(folder / "runs.jsonl", RunKey)
    contest = LanguageContest(ledger, Runner(ledger, train))
    for stage in stages:
        contest.run(stage)
    return contest


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


def test_starts_suit_the_length_of_a_run():
    for steps in (50, 200, 800):  # lr · decay · steps is the same
        muon = make_setting("muon by norm", choose_start("muon by norm"), steps)
        assert muon.lr * muon.decay * steps == pytest.approx(2.5)
        point = find_point(muon, steps)
        assert point == pytest.approx(choose_start("muon by norm"))
    for steps in (50, 800):
        setting = make_setting(RECIPE, choose_start(RECIPE), steps)
        usual = recipe_untuned.make_ours(steps)
        assert setting == replace(usual, lr=setting.lr, decay=pytest.approx(usual.decay))


def test_a_run_that_diverged_in_the_test_is_counted(tmp_path):
    def train(key):
        lost = key.stage == "test" and key.setting.arm == OURS and key.seed <= 3
        return {**invent(key), "loss": None} if lost else invent(key)

    contest = run_stages(tmp_path, train)
    (verdict, *_) = contest_summary.find_verdicts(contest)
    assert (verdict.lead.n, verdict.lead.diverged_b) == (7, 3)
    assert verdict.p == 1.0
    assert "But 3 of our runs diverged, so this is no lead." in describe_verdict(verdict)
    assert verdict.saving.n == 2


def test_our_setting_that_always_diverges_is_the_worse_one(tmp_path):
    worse = run_stages(tmp_path, invent, ("screen", "tune")).rank_settings(OURS, MIDDLE, 200)[1]

    def train(key):
        lost = key.stage == "test" and key.setting == worse and key.tokens_per_step == MIDDLE
        return {**invent(key), "loss": None} if lost else invent(key)

    contest = run_stages(tmp_path, train)
    assert compare_finalists(contest, MIDDLE, 200).mean is None


def test_no_verdict_before_both_settings_are_tested(contest, tmp_path):
    second = contest.rank_settings(OURS, MIDDLE, 200)[1]
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)
    for key, run in contest.ledger.runs.items():
        if not (key.stage == "test" and key.setting == second and key.tokens_per_step == MIDDLE):
            ledger.runs[key] = run
    part = LanguageContest(ledger, Runner(ledger, invent, seconds=0))
    with pytest.raises(MissingRunError):
        compare_finalists(part, MIDDLE, 200)
    # Two of three primary comparisons are left, and the third still counts in the correction.
    verdicts = contest_summary.find_verdicts(part)
    smallest = min((v for v in verdicts if v.primary), key=lambda v: v.lead.p)
    assert smallest.p == pytest.approx(3 * smallest.lead.p)


def test_an_arm_that_always_diverges_does_not_hold_up_the_contest(tmp_path):
    def train(key):
        lost = key.setting.arm in ("paper", "muon")
        return {**invent(key), "loss": None} if lost else invent(key)

    contest = run_stages(tmp_path, train)
    assert contest.find_muon() == "muon by norm"
    assert not [k for k in contest.ledger.runs if k.stage == "test" and k.setting.arm == "paper"]
    (row,) = (line for line in format_contest(contest).splitlines() if "| paper" in line)
    assert "diverged" in row
