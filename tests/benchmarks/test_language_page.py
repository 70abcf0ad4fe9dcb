"""The page of the docs about the language contest."""

import re

import pytest
import torch

from benchmarks.common.ledger import Ledger, Runner
from benchmarks.common.pages import fill_parts, list_parts
from benchmarks.language.contest_rules import LENGTHS, LONGER, MIDDLE, OURS, RUNS
from benchmarks.language.contest_stages import RESULTS, LanguageContest
from benchmarks.language.contest_state import describe_state, describe_validation
from benchmarks.language.contest_tables import make_parts
from benchmarks.language.contest_verdicts import LEAST_SAVING
from benchmarks.language.language_runs import RunKey
from benchmarks.language.update_page import FOLLOWING, KIND, PAGE, ROOT, collect_parts, update_page
from neumann.lab.models.gpt import ModernGPT, parse_size
from tests.support.language_scores import invent, run_stages

MADE = {"settings", "verdicts", "sentences", "tests", "larger"}
PARTS = {*MADE, "state", "validation", "plots", "throughput"}


@pytest.fixture(scope="module")
def published():
    return LanguageContest.read(ROOT / RESULTS)


def test_the_page_is_up_to_date(published):
    """If this fails, run python -m benchmarks.language.update_page."""
    page = PAGE.read_text()
    assert set(list_parts(page, KIND)) == PARTS
    assert fill_parts(page, KIND, collect_parts(published)) == page


def test_the_page_says_how_many_runs_a_search_has():
    smallest, middle, largest = RUNS.values()
    text = " ".join(PAGE.read_text().split())
    assert f"{smallest} at 65,536 tokens per step, {middle} at 262,144 and {largest} at" in text


def test_the_momenta_of_the_recipe_are_best_at_every_length(published):
    """As docs/ablations.md says."""
    best = [published.searches.rank_settings(OURS, *length)[0] for length in LENGTHS.items()]
    assert {(setting.before, setting.momentum) for setting in best} == {(0.8, 0.6)}
    assert sorted(LENGTHS.values()) == [50, 200, 800]


@pytest.mark.parametrize("vocabulary", [16384, 50257])
def test_pages_say_how_large_the_larger_network_is(vocabulary):
    with torch.device("meta"):
        model = ModernGPT(vocabulary, 256, parse_size("gpt:124m"))
    count = sum(parameter.numel() for parameter in model.parameters())
    for page in (PAGE, ROOT / "docs/lab.md"):
        assert f"{count / 1e6:.1f} million" in page.read_text()


@pytest.mark.slow
def test_every_part_of_a_finished_contest_has_a_text(contest):
    parts = make_parts(contest)
    assert set(parts) == MADE
    assert all(parts.values())
    assert all(collect_parts(contest).values())


@pytest.mark.slow
def test_the_page_of_a_finished_contest(contest, tmp_path):
    """Its opening is in accord with its verdicts, and it shows two plots."""
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    update_page(contest, page, tmp_path / "plots")
    text = page.read_text()
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        "contest-loss.png",
        "contest-saving.png",
    }
    assert "not finished" not in text
    assert "Still to come" not in text
    opening = " ".join(text[: text.index("## Verdicts")].split())
    assert (
        "The contest is finished. At 65,536, 262,144 and 1,048,576 tokens per step, ours" in opening
    )
    assert "ours is ahead of the best peer. The goal is missed." in opening
    for name in ("loss", "saving"):
        pattern = rf"!\[[^\]]+\]\(\.\./results/language/contest-{name}\.png\)\n\n\*[^*]+\*\n"
        assert re.search(pattern, text), name
    assert "Test losses at the end: Neumann spectral 2.000" in text
    assert re.search(r"for its loss: 9\d % at 65,536 tokens per step, 9\d % at 262,144", text)


@pytest.mark.slow
def test_the_opening_while_tests_are_run(contest, tmp_path):
    """It says how many are done, and where that is enough for a verdict."""
    part = LanguageContest(Ledger(tmp_path / "runs.jsonl", RunKey), Runner(contest.ledger, invent))
    part.finalists = contest.finalists
    part.ledger.runs = {
        key: run
        for key, run in contest.ledger.runs.items()
        if key.stage == "tune" or (key.stage == "test" and key.tokens_per_step == MIDDLE)
    }
    text = describe_state(part)
    assert re.search(
        r"^The contest is not finished: .* \d+ of at least \d+ runs that follow are", text
    )
    assert text.endswith("done. At 262,144 tokens per step, ours is ahead of the best peer.")
    part.ledger.runs = {
        key: run | {"loss": run["loss"] + (0.2 if key.seed % 2 else -0.1)}
        if (key.stage, key.setting.arm) == ("test", OURS)
        else run
        for key, run in part.ledger.runs.items()
    }
    assert "ours is not significantly different from the best peer." in describe_state(part)


@pytest.mark.slow
def test_what_the_searches_say(tmp_path):
    """The saving that a lead stands for, from two lengths of ours; no prophecy after the test."""
    contest = run_stages(tmp_path, invent, ("screen", "tune"))
    assert describe_state(contest).startswith("The contest is not finished: settings are still")
    text = describe_validation(contest)
    ours, theirs, longer = (
        contest.searches.find_best_loss(arm, *length)
        for arm, length in ((OURS, (MIDDLE, 200)), ("muon by norm", (MIDDLE, 200)), (OURS, LONGER))
    )
    assert f"{theirs - ours:+.4f} at 262,144" in text
    assert "the best peer, Muon (by norm), is, in nats, " in text
    assert text.index("The fewer the steps, the larger the lead.") > text.index("tokens per step.")
    share = 1 - 2 ** ((ours - theirs) / (ours - longer))
    assert f"our lead there is worth {100 * share:.0f} % of the steps" in text
    assert (share < LEAST_SAVING) is text.endswith("So the goal will probably be missed.")
    finished = run_stages(tmp_path, invent, ("test",))
    assert "probably" not in describe_validation(finished)


def test_a_contest_without_runs_has_a_page(tmp_path):
    ledger = Ledger(tmp_path / "none.jsonl", RunKey)
    parts = collect_parts(LanguageContest(ledger, Runner(ledger, invent)))
    assert {name for name, text in parts.items() if not text} == {*FOLLOWING}
    assert parts["validation"] == "*Still to come.*"
    assert "not finished" in parts["state"]


def test_only_the_parts_of_a_kind_change():
    page = (
        "a\n<!-- one x -->\nold\n<!-- end of one -->\n<!-- two x -->\nold\n<!-- end of two -->\nz"
    )
    filled = fill_parts(page, "one", {"x": "new"})
    assert filled == page.replace("old", "new", 1)
    assert fill_parts(filled, "one", {"x": "new"}) == filled
    assert list_parts(page, "one") == ["x"]
    with pytest.raises(KeyError):
        fill_parts(page, "one", {})
