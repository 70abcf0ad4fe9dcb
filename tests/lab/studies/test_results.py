"""What a comparison says: p values are corrected once, for everyone who reads it."""

import json

import pytest

from neumann.lab.commands import demo_verdict
from neumann.lab.report.study_records import read_study
from neumann.lab.report.verdicts import state_verdict
from neumann.lab.studies.results import read_comparison
from neumann.lab.studies.statistics import correct_by_holm, paired_difference
from tests.support.fake_records import fake_comparison

FIRST = [98.0, 98.1, 97.9, 98.2, 97.8]
NEAR = [98.1, 97.9, 98.0, 98.0, 98.1]
SLIGHT = [97.9, 98.0, 97.89, 98.0, 97.75]  # p is 0.04 alone


@pytest.fixture
def folder(tmp_path):
    scores = {"sgd": FIRST, "adam": SLIGHT, "adamw": NEAR, "nadam": NEAR}
    fake_comparison(tmp_path, {arm: {} for arm in scores}, 5, epochs=1)
    for arm, values in scores.items():
        for seed, score in enumerate(values):
            run = tmp_path / arm / f"seed-{seed}"
            found = json.loads((run / "summary.json").read_text())["accuracy"]
            for name in ("summary.json", "metrics.jsonl"):
                path = run / name
                path.write_text(path.read_text().replace(str(found), str(score)))
    return tmp_path


def test_p_values_are_corrected_for_the_arms_that_are_compared(folder):
    comparison = read_comparison(folder)
    alone = [paired_difference(FIRST, other).p for other in (SLIGHT, NEAR, NEAR)]
    found = [row.difference.p for row in comparison.rows[1:]]
    assert found == pytest.approx(correct_by_holm(alone))
    other = comparison.compare_with(1)
    alone = [paired_difference(SLIGHT, other).p for other in (FIRST, NEAR, NEAR)]
    found = [row.difference.p for row in other.rows if row.difference is not None]
    assert found == pytest.approx(correct_by_holm(alone))


def test_terminal_report_and_demo_give_one_verdict(folder):
    """What is clear alone is a tie among several comparisons, wherever it is said."""
    assert paired_difference(FIRST, SLIGHT).is_clear
    comparison = read_comparison(folder)
    sentence = demo_verdict.state_verdict(comparison, 40)
    assert sentence.endswith("sgd ties with adam, adamw and nadam.")
    printed = [text.lower() + "." for text in comparison.state_verdicts()]
    shown = [text.lower() for text in state_verdict(read_study(folder)).findings]
    assert shown == printed
    assert all(text.startswith("no clear difference between sgd and ") for text in shown)
