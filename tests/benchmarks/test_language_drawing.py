"""The plots of the language contest, on invented runs."""

from dataclasses import replace

import pytest

from benchmarks.common.labels import spread_labels
from benchmarks.common.ledger import Ledger, Runner
from benchmarks.language.contest_plots import (
    collect_curves,
    draw_all,
    draw_losses,
    draw_savings,
)
from benchmarks.language.contest_rules import LENGTHS, MIDDLE, make_key
from benchmarks.language.contest_stages import LanguageContest
from benchmarks.language.contest_verdicts import find_verdicts
from benchmarks.language.language_runs import RunKey
from tests.support.language_scores import invent, run_stages

pytestmark = pytest.mark.slow


def list_texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_both_plots_are_written(contest, tmp_path):
    written = draw_all(contest, tmp_path / "new")
    assert [path.name for path in written] == ["contest-loss.png", "contest-saving.png"]
    assert all(path.stat().st_size > 10_000 for path in written)


def test_lines_are_named_where_they_end(contest):
    figure = draw_losses(collect_curves(contest))
    names = [text.split(":")[0] for text in list_texts(figure)]
    assert names == ["Neumann spectral", "Muon (by norm)", "AdamW"]
    assert figure.axes[0].get_legend() is None
    line = figure.axes[0].lines[0]
    assert line.get_xdata()[-1] == LENGTHS[MIDDLE] - 3  # every fourth step, counted from 1
    assert line.get_xdata()[0] >= 0.1 * LENGTHS[MIDDLE]


def test_steps_to_equal_loss_have_their_numbers_beside_them(contest):
    verdicts = [verdict for verdict in find_verdicts(contest) if verdict.primary]
    texts = list_texts(draw_savings(verdicts))
    assert "Neumann spectral" in texts
    assert texts.count("Muon (by norm)") == 3
    for batch, steps in LENGTHS.items():
        (verdict,) = (v for v in verdicts if v.batch == batch)
        assert 0 < verdict.saving.low <= verdict.saving.middle <= verdict.saving.high < 0.2
        assert f"{round((1 - verdict.saving.middle) * steps)} of {steps} steps" in texts


def test_what_was_tested_is_drawn_also_if_a_better_setting_is_found_later(tmp_path):
    contest = run_stages(tmp_path, invent)
    best = contest.searches.rank_settings("adamw", MIDDLE, 200)[0]
    late = replace(best, output=0.123)
    key = make_key("tune", MIDDLE, 200, late, 0)
    contest.ledger.add(key, {**invent(key), "loss": 1.0})
    assert contest.searches.rank_settings("adamw", MIDDLE, 200)[0] == late
    assert len(collect_curves(contest)) == 3


def test_nothing_to_draw(tmp_path):
    ledger = Ledger(tmp_path / "none.jsonl", RunKey)
    assert draw_all(LanguageContest(ledger, Runner(ledger, invent)), tmp_path) == []


def test_labels_do_not_overlap():
    assert spread_labels([2.0, 2.04, 2.5], 0.1) == pytest.approx([1.97, 2.07, 2.5])
    assert spread_labels([3.0, 1.0], 0.1) == [3.0, 1.0]
    crowd = spread_labels([1.0, 1.02, 1.0, 1.11], 0.1)
    assert sorted(crowd) == pytest.approx([0.8825, 0.9825, 1.0825, 1.1825])
