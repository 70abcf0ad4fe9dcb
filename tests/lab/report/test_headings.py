"""Lines above a report about its settings."""

import pytest

from neumann.lab.report.headings import compose_subtitle, compose_title, describe_held_out
from neumann.lab.report.study_records import read_study
from tests.support.fake_records import fake_comparison, fake_run, fake_sweep


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data": "digits", "tokens": "chars"}, "a tenth of the training set held out"),
        ({"data": "text:a.txt"}, "a tenth of the training set held out"),
        ({"data": "text:a.txt", "tokens": "chars"}, "a tenth of the training set held out"),
        ({"data": "text:a.txt", "tokens": "bytes"}, "scored on the validation documents"),
        ({"data": "text:a.txt", "tokens": "bpe:512"}, "scored on the validation documents"),
    ],
)
def test_what_held_out_means(settings, words):
    assert describe_held_out(settings) == words


def read_subtitle(folder):
    return compose_subtitle(read_study(folder))[0].split(" · ")


def test_the_length_is_given_in_epochs_and_in_steps(tmp_path):
    finished = fake_comparison(tmp_path / "a", {"sgd": {}, "adam": {"diverged_seeds": (1,)}})
    assert read_subtitle(finished)[0] == "6 epochs (120 steps)"
    assert read_subtitle(fake_run(tmp_path / "b"))[0] == "6 epochs (120 steps)"
    assert read_subtitle(fake_run(tmp_path / "c", ended=2))[0] == "6 epochs"


def test_what_differs_between_the_arms_is_not_said_of_all(tmp_path):
    arms = {"sgd": {"epochs": 3}, "adam": {"epochs": 6, "batch_size": 9}}
    shown = read_subtitle(fake_comparison(tmp_path, arms))
    assert shown == ["linear schedule", "3 seeds"]


TAKER = "neumann-spectral:momentum=0.8,lr=neumann-spectral"


@pytest.mark.parametrize("winners", [None, {"neumann-spectral": 0.4, "muon": 0.1, TAKER: 0.4}])
def test_the_title_of_a_sweep_names_arms_that_are_not_searched(tmp_path, winners):
    grid = {"neumann-spectral": [0.1, 0.4], "muon": [0.1, 0.4], TAKER: []}
    title = compose_title(read_study(fake_sweep(tmp_path, grid, winners)))
    arms = "neumann-spectral, muon and neumann-spectral (momentum 0.8)"
    assert title == f"Learning rates of {arms} on digits"
