"""The page of the docs about the language contest."""

import pytest

from benchmarks.common.pages import fill_parts, list_parts
from benchmarks.language.contest_stages import RUNS
from benchmarks.language.contest_tables import make_parts
from benchmarks.language.update_page import KIND, PAGE, collect_parts

PARTS = {"settings", "verdicts", "sentences", "tests", "larger", "throughput"}


def test_the_page_is_up_to_date():
    """If this fails, run python -m benchmarks.language.update_page."""
    page = PAGE.read_text()
    assert set(list_parts(page, KIND)) == PARTS
    assert fill_parts(page, KIND, collect_parts()) == page


def test_the_page_says_how_many_runs_a_search_has():
    smallest, middle, largest = RUNS.values()
    text = " ".join(PAGE.read_text().split())
    assert f"{smallest} at 65,536 tokens per step, {middle} at 262,144 and {largest} at" in text


@pytest.mark.slow
def test_every_part_of_a_finished_contest_has_a_text(contest):
    parts = make_parts(contest)
    assert set(parts) == PARTS - {"throughput"}
    assert all(parts.values())


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
