"""Tests of claims on runs of several lengths: epochs to an accuracy, and steps saved."""

import math

import pytest
from scipy import stats

from benchmarks.paper.claim_tests import Source
from benchmarks.paper.judging import Verdict
from benchmarks.paper.length_tests import (
    AdvantageByBatch,
    EpochsToAccuracy,
    StepsSaved,
    find_epochs,
    interpolate,
    jackknife,
)
from benchmarks.paper.run_lines import Results
from benchmarks.paper.verdict_table import judge_claims
from tests.support.invented_claims import make_claim

NOISE = (0.0, 0.02, -0.01, 0.01, -0.02)
REFERENCE = Source("one", "nesterov")
WHOLE = Source("one", "base")
LENGTHS = {n: Source("one", "neumann", f"e={n}") for n in (42, 48, 54, 60)}


@pytest.mark.parametrize(
    ("scores", "epochs", "reached"),
    [
        ({15: 90.0, 30: 92.0, 60: 94.0}, 30.0, True),
        ({15: 90.0, 30: 94.0, 60: 95.0}, 15 * math.sqrt(2), True),  # half of a doubling
        ({15: 93.0, 30: 94.0}, 15.0, True),
        ({15: 80.0, 30: 90.0, 60: 91.9}, 60.0, False),
    ],
)
def test_epochs_to_an_accuracy(scores, epochs, reached):
    found = find_epochs(scores, 92.0)
    assert (found.epochs, found.reached) == (pytest.approx(epochs), reached)
    assert found.interpolated == (reached and epochs > 15)


def test_accuracies_between_two_lengths():
    scores = {15: 90.0, 30: 92.0, 60: 93.0}
    for epochs, score in ((15, 90.0), (15 * math.sqrt(2), 91.0), (30, 92.0), (60, 93.0)):
        assert interpolate(scores, epochs) == pytest.approx(score)


def test_the_jackknife_of_a_mean_is_the_mean():
    """Its interval has to be the one of Student."""
    values = [1.0, 2.0, 4.0, 8.0]
    assert jackknife(lambda some: sum(values[k] for k in some) / len(some), range(4)) == (
        pytest.approx(values)
    )
    assert jackknife(len, [3]) == []


def record_lengths(study, arm, batch, lost):
    """Two points for each doubling of the epochs, less than at the small batch by `lost`."""
    found = {n: Source("one", arm, f"{batch},{n}") for n in (15, 30, 60)}
    noise = NOISE if batch == "s" else NOISE[::-1]
    for epochs, source in found.items():
        score = 90 + 2 * math.log2(epochs / 15) - lost
        study(arm, [score + each for each in noise], source.point)
    return found


def judge_epochs(study, folder, lost, target=91.1):
    small, large = (record_lengths(study, "neumann", *each) for each in (("s", 0.0), ("l", lost)))
    study("nesterov", [target, None, target, target, target])
    test = EpochsToAccuracy(small, large, REFERENCE, 1.14)
    return judge_claims(Results(folder), [make_claim(2, test)])[0]


def test_a_batch_that_needs_more_epochs(study, tmp_path):
    row = judge_epochs(study, tmp_path, lost=2.0)
    assert row.verdict == Verdict.NOT_SUPPORTED
    assert "2.00 [1.99, 2.01] × the epochs to 91.1 %, n = 5" in row.figure


def test_a_batch_that_needs_as_many_epochs(study, tmp_path):
    row = judge_epochs(study, tmp_path, lost=0.05)
    assert row.verdict == Verdict.SUPPORTED
    assert "1.02 [1.01, 1.02] × the epochs" in row.figure


def test_a_batch_that_never_gets_there_cannot_support(study, tmp_path):
    """At 60 epochs it is compared with more than it has reached."""
    row = judge_epochs(study, tmp_path, lost=0.2, target=93.95)
    assert row.verdict == Verdict.INCONCLUSIVE
    assert "at least 1.02" in row.figure
    assert judge_epochs(study, tmp_path, lost=9.0).verdict == Verdict.NOT_SUPPORTED


def test_without_the_epochs_of_the_small_batch_nothing_is_compared(study, tmp_path):
    """All of its runs are beyond the accuracy."""
    assert judge_epochs(study, tmp_path, lost=9.0, target=80.0).verdict == Verdict.INCONCLUSIVE


def test_a_seed_that_diverged_is_left_out_and_counted(study, tmp_path):
    small, large = (record_lengths(study, "neumann", each, 0.0) for each in "sl")
    study("neumann", [90.0, None], large[15].point)
    study("nesterov", [91.1] * 5)
    test = EpochsToAccuracy(small, large, REFERENCE, 1.14)
    (row,) = judge_claims(Results(tmp_path), [make_claim(2, test)])
    assert "n = 4" in row.figure
    assert row.notes[0] == "1 run diverged"
    assert row.verdict == Verdict.INCONCLUSIVE


def record_shorter(study, ahead, noise=NOISE):
    """Ahead of the baseline at equal length, by 0.1 points less for each six epochs."""
    for epochs, source in LENGTHS.items():
        gain = ahead - (60 - epochs) / 60
        study("neumann", [94 + gain + each for each in noise], source.point)
    study("base", [94.0] * 5)


def judge_saving(folder):
    test = StepsSaved(LENGTHS, WHOLE, 0.1)
    return judge_claims(Results(folder), [make_claim(4, test)])[0]


@pytest.mark.parametrize(
    ("ahead", "verdict", "figure"),
    [
        (0.2, Verdict.SUPPORTED, "20.0 % [18.1 %, 22.1 %] of the steps saved, n = 5"),
        (0.05, Verdict.SMALLER, "5.1 % [3.1 %, 7.1 %] of the steps saved, n = 5"),
        (-0.1, Verdict.NOT_SUPPORTED, "none [none, none] of the steps saved, n = 5"),
        (0.5, Verdict.SUPPORTED, "over 30.0 % [over 30.0 %, over 30.0 %] of the steps saved"),
    ],
)
def test_steps_saved(study, tmp_path, ahead, verdict, figure):
    record_shorter(study, ahead)
    row = judge_saving(tmp_path)
    assert row.verdict == verdict
    assert figure in row.figure


def test_steps_saved_within_the_noise_are_undecided(study, tmp_path):
    record_shorter(study, 0.05, [20 * each for each in NOISE])
    row = judge_saving(tmp_path)
    assert row.verdict == Verdict.INCONCLUSIVE
    assert "[none, over 30.0 %]" in row.figure


def test_the_interval_holds_the_claimed_saving_exactly_if_p_does_not_exclude_it(study, tmp_path):
    """The lead that the interval's lower end needs, by Student's quantile."""
    deviation = stats.tstd(NOISE)
    least = stats.t.ppf(0.975, 4) * deviation / math.sqrt(5)
    for factor, verdict in ((0.98, Verdict.INCONCLUSIVE), (1.02, Verdict.SUPPORTED)):
        record_shorter(study, factor * least + 0.0)
        row = judge_saving(tmp_path)
        assert ("[none" in row.figure) == (verdict == Verdict.INCONCLUSIVE), row.figure


def test_savings_of_runs_that_diverged(study, tmp_path):
    record_shorter(study, 0.2)
    study("neumann", [None] * 4, LENGTHS[48].point)
    row = judge_saving(tmp_path)
    assert row.verdict == Verdict.INCONCLUSIVE
    assert "too few runs ended" in row.figure
    assert row.notes[0] == "4 runs diverged"


@pytest.mark.parametrize(("growth", "verdict"), [(0.5, "SUPPORTED"), (-0.5, "NOT_SUPPORTED")])
def test_an_advantage_that_grows_with_the_batch(study, tmp_path, growth, verdict):
    sides = [{b: Source("one", arm, f"b={b}") for b in (128, 512)} for arm in ("neumann", "base")]
    for source in sides[0].values():
        large = source.point == "b=512"
        scores = [94 + growth * large + noise * (1 + large) for noise in NOISE]
        study("neumann", scores, source.point)
    for source in sides[1].values():
        study("base", [94.0] * 5, source.point)
    (row,) = judge_claims(Results(tmp_path), [make_claim(23, AdvantageByBatch(*sides))])
    assert row.verdict == Verdict[verdict]
    assert "advantage at 512 − advantage at 128, by a line" in row.figure
