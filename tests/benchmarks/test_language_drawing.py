"""The plots of the language contest, on invented runs."""

import math

import pytest

from benchmarks.common.ledger import Ledger, Runner
from benchmarks.language.contest_stages import LENGTHS, MIDDLE, OURS, STAGES, LanguageContest
from benchmarks.language.contest_summary import find_verdicts
from benchmarks.language.draw_contest import (
    collect_curves,
    draw_all,
    draw_losses,
    draw_savings,
    spread_labels,
)
from benchmarks.language.language_runs import RunKey

pytestmark = pytest.mark.slow

BOTTOMS = {OURS: 2.00, "muon by norm": 2.04, "adamw": 2.3}  # others: 2.5


def invent(key):
    bottom = BOTTOMS.get(key.setting.arm, 2.5) + 0.01 * math.log2(key.setting.lr / 0.008) ** 2
    bottom += {65_536: 0.9, 262_144: 0.5}.get(key.tokens_per_step, 0.25) * (
        LENGTHS[key.tokens_per_step] / key.steps - 1
    )
    bottom += 0.004 * math.sin(99 * key.seed + key.steps + len(key.setting.arm))
    places = range(0, key.steps, max(1, key.steps // 50))
    losses = [bottom + 8 / (1 + 40 * place / key.steps) for place in places]
    return {"loss": bottom, "train_loss": bottom, "losses": losses}


@pytest.fixture(scope="module")
def contest(tmp_path_factory):
    ledger = Ledger(tmp_path_factory.mktemp("contest") / "runs.jsonl", RunKey)
    contest = LanguageContest(ledger, Runner(ledger, invent))
    for stage in STAGES:
        contest.run(stage)
    return contest


def list_texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_both_plots_are_written(contest, tmp_path):
    written = draw_all(contest, tmp_path / "new")
    assert [path.name for path in written] == ["contest-loss.png", "contest-saving.png"]
    assert all(path.stat().st_size > 10_000 for path in written)


def test_lines_are_named_where_they_end(contest):
    figure = draw_losses(collect_curves(contest))
    names = [text.split(":")[0] for text in list_texts(figure)]
    assert names == ["Neumann, spectral", "Muon", "AdamW"]
    assert figure.axes[0].get_legend() is None
    line = figure.axes[0].lines[0]
    assert line.get_xdata()[-1] == LENGTHS[MIDDLE] - 3  # every fourth step, counted from 1
    assert line.get_xdata()[0] >= 0.1 * LENGTHS[MIDDLE]


def test_steps_to_equal_loss_have_their_numbers_beside_them(contest):
    verdicts = [verdict for verdict in find_verdicts(contest) if verdict.primary]
    texts = list_texts(draw_savings(verdicts))
    assert "Neumann, spectral" in texts
    assert texts.count("Muon") == 3
    for batch, steps in LENGTHS.items():
        (verdict,) = (v for v in verdicts if v.batch == batch)
        assert 0 < verdict.saving.low <= verdict.saving.middle <= verdict.saving.high < 0.2
        assert f"{round((1 - verdict.saving.middle) * steps)} of {steps} steps" in texts


def test_nothing_to_draw(tmp_path):
    ledger = Ledger(tmp_path / "none.jsonl", RunKey)
    assert draw_all(LanguageContest(ledger, Runner(ledger, invent)), tmp_path) == []


def test_labels_do_not_overlap():
    assert spread_labels([2.0, 2.04, 2.5], 0.1) == pytest.approx([1.97, 2.07, 2.5])
    assert spread_labels([3.0, 1.0], 0.1) == [3.0, 1.0]
    crowd = spread_labels([1.0, 1.02, 1.0, 1.11], 0.1)
    assert sorted(crowd) == pytest.approx([0.8825, 0.9825, 1.0825, 1.1825])
