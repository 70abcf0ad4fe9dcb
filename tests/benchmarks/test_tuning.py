"""The rules of the large-batch contest, on scores from a formula."""

import math

import pytest

from benchmarks.common.ledger import MissingRunError
from benchmarks.contest.entrants import ENTRANTS, ContestLedger, Setting
from benchmarks.contest.stages import BATCHES, Contest
from benchmarks.contest.tuning import Search, Tuning
from tests.support.contest_scores import MUON, landscape


@pytest.mark.parametrize("octaves", [-5, -1, 0, 1, 4])
def test_search_widens_until_the_best_is_bracketed(octaves):
    best_lr = ENTRANTS["Muon"].lr * 2.0**octaves
    asked = []

    def score(key):
        asked.append(key.setting.lr)
        return landscape(best_lr)(key)

    assert MUON.find_best(score) == Setting(best_lr, 2.0, 0.6)
    assert min(asked) < best_lr < max(asked)
    assert {lr / best_lr for lr in asked} <= {2.0**k for k in range(-12, 12)}


@pytest.mark.parametrize("side", [-1, 1])
def test_search_continues_past_a_tie(side):
    """Two equally good rates are bracketed together, and the first one wins."""
    middle = ENTRANTS["Muon"].lr
    asked = []

    def score(key):
        asked.append(key.setting.lr)
        return landscape(middle * 2.0 ** (side / 2))(key)

    assert MUON.find_best(score) == Setting(middle, 2.0, 0.6)
    assert middle * 2.0 ** (2 * side) in asked


def test_all_batch_sizes_start_at_the_same_learning_rates():
    middle = ENTRANTS["AdamW"].lr
    for batch in BATCHES:
        started = {key.setting.lr for key in Search("AdamW", batch, 12).start_keys()}
        assert started == {middle / 2, middle, middle * 2}


@pytest.mark.parametrize(("batch", "full"), [(512, 12), (2048, 12), (8192, 29), (16384, 36)])
def test_only_large_batches_are_tuned_at_full_length(batch, full, tmp_path):
    tuning = Contest(ContestLedger(tmp_path / "runs.jsonl")).tuning(batch)
    assert tuning.full_epochs == full


def test_contenders_are_tuned_again_at_full_length():
    """Runs of twice the length need twice the rate. LAMB is too far behind, LARS has no search yet,
    and ours is far ahead."""
    tops = {"Muon": 0.5, "AdamW": 0.0, "LAMB": -0.1, "Neumann spectral": 9.0}
    asked = set()

    def score(key):
        if key.entrant not in tops:
            raise MissingRunError
        asked.add(key)
        entrant = ENTRANTS[key.entrant]
        best_lr = entrant.lr * key.epochs / 12
        found = landscape(best_lr, decay=entrant.decays[0], momentum=0.9)(key)
        return found + tops[key.entrant]

    tuning = Tuning(score, 8192, 12, 24)
    lrs = {name: tuning.find_chosen(name).setting.lr / ENTRANTS[name].lr for name in tops}
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
    with pytest.raises(MissingRunError):
        tuning.find_chosen("LARS")
    same = Tuning(score, 16384, 24, 24)
    assert not any(map(same.is_contender, tops))


def test_transfer_tunes_only_the_learning_rate():
    asked = set()

    def score(key):
        asked.add((key.model, key.setting.decay, key.setting.momentum))
        return landscape(0.02)(key)

    search = Search("Muon", 8192, 12, "resnet18")
    assert search.find_lr(score, Setting(0.04, 0.1, 0.9)) == Setting(0.02, 0.1, 0.9)
    assert asked == {("resnet18", 0.1, 0.9)}


@pytest.mark.parametrize(("slope", "octaves"), [(1.0, 2.0), (0.5, 4.0), (0.9, 2.0), (3.0, 0.0)])
def test_lr_range_has_the_width_of_the_hill(slope, octaves):
    """The rates within a point of the top span 2/slope octaves; the grid has a ratio of √2."""
    low, high = MUON.find_lr_range(landscape(0.08, slope), Setting(0.04, 2.0, 0.6))
    assert math.log2(high / low) == octaves
    assert math.sqrt(low * high) == pytest.approx(0.08)
