"""The contest's tables in README and docs."""

import json

import pytest

from benchmarks.common.pages import list_parts
from benchmarks.contest.draw_figure import draw_contest
from benchmarks.contest.markdown_tables import format_overview, format_pairs, format_summary
from benchmarks.contest.update_pages import KIND, PAGES, SUMMARY, fill_page


def row(entrant, mean, *, ours=False, **changes):
    interval = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "n": 5, "diverged": 0}
    return {
        "entrant": entrant,
        "ours": ours,
        "setting": {"lr": 0.04, "decay": 2.0, "momentum": 0.6},
        "held_out": 94.0,
        "scores": {"0": mean},
        "interval": interval,
        "difference": None,
        "with_training_statistics": None,
        "steps": 144,
        "seconds": None,
        "range": None,
        **changes,
    }


def untested(entrant):
    nothing = {"mean": None, "low": None, "high": None, "n": 0, "diverged": 0}
    return row(entrant, 0.0, scores={}, interval=nothing, steps=None)


SMALL = {"batch": 512, "rows": [row("LAMB", 93.0), row("LARS", 93.5), row("Muon", 94.0)]}
LARGE = {
    "batch": 8192,
    "rows": [row("LAMB", 88.0), row("Muon", 94.1), untested("LARS")],
}
FURTHER = {"batch": 16384, "rows": [untested("Muon")]}


def test_overview_lists_the_tested_best_first():
    assert format_overview([SMALL, LARGE, FURTHER]).splitlines() == [
        "| test accuracy, % | batch 512, 144 steps | batch 8192, 144 steps |",
        "| --- | --: | --: |",
        "| Muon | 94.00 ± 0.10 | 94.10 ± 0.10 |",
        "| LAMB | 93.00 ± 0.10 | 88.00 ± 0.10 |",
        "| LARS | 93.50 ± 0.10 |  |",
    ]


def test_pairs_are_matched_by_seed_and_corrected_together():
    """Pairs that differ by 2 and 6 have t = 2 and p = 0.295; Holm doubles it for two of them."""
    ours = row("diagonal", 0, scores={"0": 92.0, "1": 97.0, "2": 50.0})
    rival = row("AdamW", 0, scores={"0": 90.0, "1": 91.0})
    batches = [{"batch": batch, "rows": [ours, rival]} for batch in (512, 2048)]
    batches.append({"batch": 8192, "rows": [ours, untested("AdamW")]})
    cell = "+4.00 [−21.41, +29.41], p = 0.59"
    assert format_pairs(batches, {"diagonal": "AdamW"}).splitlines() == [
        "| points of accuracy | batch 512 | batch 2048 | batch 8192 |",
        "| --- | --: | --: | --: |",
        f"| diagonal over AdamW | {cell} | {cell} |  |",
    ]


def test_empty_columns_are_left_out():
    difference = {"mean": -0.5, "low": -0.7, "high": -0.3, "p": 0.001, "p_holm": 0.002}
    rows = [row("Neumann spectral", 93.5, ours=True, difference=difference), row("Muon", 94.0)]
    assert format_summary(rows).splitlines() == [
        "| optimizer | lr, decay, momentum | held out, % | tested, % | n | vs. best peer "
        "| p (Holm) |",
        "| --- | --- | --: | --: | --: | --: | --: |",
        "| Muon | 0.04, 2, 0.6 | 94.00 | 94.00 ± 0.10 | 5 |  |  |",
        "| **Neumann spectral** | 0.04, 2, 0.6 | 94.00 | 93.50 ± 0.10 | 5 "
        "| −0.50 [−0.70, −0.30] | 0.002 |",
    ]


def test_tables_go_between_their_marks():
    found = {"resnet9": [SMALL], "resnet18": [LARGE]}
    page = "a\n<!-- contest {} -->\nold\n| old |\n<!-- end of contest -->\nz"
    for name, expected in (
        ("overview", format_overview([SMALL])),
        ("forms", format_overview([{"batch": 512, "rows": [row("Muon", 94.0)]}])),
        ("512", format_summary(SMALL["rows"])),
        ("resnet18 8192", format_summary(LARGE["rows"])),
    ):
        once = fill_page(page.format(name), found)
        assert once == page.format(name).replace("old\n| old |", expected)
        assert fill_page(once, found) == once


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_are_up_to_date(path):
    """If this fails, run python -m benchmarks.contest.update_pages."""
    page = path.read_text()
    assert list_parts(page, KIND)
    assert fill_page(page, json.loads(SUMMARY.read_text())) == page


def test_figure_of_the_tested(tmp_path):
    """A single seed has no interval."""
    single = {"mean": 94.0, "low": None, "high": None, "n": 1, "diverged": 0}
    parts = [SMALL, {"batch": 8192, "rows": [row("Muon", 94.0, interval=single)]}, FURTHER]
    draw_contest(parts, tmp_path / "contest.png")
    assert (tmp_path / "contest.png").read_bytes().startswith(b"\x89PNG")
