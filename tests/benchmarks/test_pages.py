"""The contest's tables in README and docs."""

import json
from dataclasses import replace

import pytest

from benchmarks.common.pages import list_parts
from benchmarks.contest.draw_figure import draw_contest
from benchmarks.contest.entrants import ContestLedger, RunKey, Setting
from benchmarks.contest.image_families import Comparison, Family, find_cifar10, load_families
from benchmarks.contest.markdown_tables import (
    format_families,
    format_overview,
    format_pairs,
    format_summary,
)
from benchmarks.contest.update_pages import KIND, PAGES, README, SUMMARY, fill_page, fill_readme
from neumann.lab.studies.statistics import paired_difference


@pytest.fixture(scope="module")
def families():
    return load_families()


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


def final_key(entrant, batch):
    return RunKey("final", "resnet9", batch, 24, entrant, Setting(0.04, 2.0, 0.6))


SMALL = {
    "model": "resnet9",
    "batch": 512,
    "rows": [row("LAMB", 93.0), row("LARS", 93.5), row("Muon", 94.0)],
}
LARGE = {
    "model": "resnet9",
    "batch": 8192,
    "rows": [row("LAMB", 88.0), row("Muon", 94.1), untested("LARS")],
}
FURTHER = {"model": "resnet9", "batch": 16384, "rows": [untested("Muon")]}


def test_overview_lists_the_tested_best_first():
    assert format_overview([SMALL, LARGE, FURTHER]).splitlines() == [
        "| test accuracy, % | batch 512, 144 steps | batch 8192, 144 steps |",
        "| --- | --: | --: |",
        "| Muon | 94.00 ± 0.10 | 94.10 ± 0.10 |",
        "| LAMB | 93.00 ± 0.10 | 88.00 ± 0.10 |",
        "| LARS | 93.50 ± 0.10 |  |",
    ]


def test_pairs_are_matched_by_seed_and_corrected_together(tmp_path):
    """Pairs that differ by 2 and 6 have t = 2 and p = 0.295; Holm doubles it for two of them."""
    ledger, names = ContestLedger(tmp_path / "runs.jsonl"), ("Neumann diagonal", "AdamW")
    for batch in (512, 2048):
        for name, scores in zip(names, ([92.0, 97.0, 50.0], [90.0, 91.0]), strict=True):
            for seed, score in enumerate(scores):
                key = replace(final_key(name, batch), seed=seed)
                ledger.add(key, {"accuracy": score, "recalibrated": None})
    family = find_cifar10(ledger, ContestLedger(tmp_path / "none.jsonl"))
    ours, rival = (row(name, 90.0) for name in names)
    batches = [{"model": "resnet9", "batch": batch, "rows": [ours, rival]} for batch in (512, 2048)]
    batches.append({"model": "resnet9", "batch": 8192, "rows": [ours, untested("AdamW")]})
    cell = "+4.00 [−21.41, +29.41], p = 0.59"
    assert format_pairs(batches, dict([names]), family).splitlines() == [
        "| points of accuracy | batch 512 | batch 2048 | batch 8192 |",
        "| --- | --: | --: | --: |",
        f"| Neumann diagonal over AdamW | {cell} | {cell} |  |",
    ]


def test_families_are_counted_by_what_was_compared():
    lead = paired_difference([94.0, 95.0], [93.0, 93.5])
    muon, older = (
        final_key("Muon", 512),
        replace(final_key("Muon", 512), setting=Setting(0.3, 2.0, 0.6)),
    )
    lamb, recipe = final_key("LAMB", 512), final_key("recipe", 512)
    pairs = (lamb, muon), (lamb, older), (final_key("LARS", 512), older), (recipe, muon)
    family = Family({Comparison(*pair): lead for pair in pairs}, to_come=8)
    assert format_families({"resnet9": [SMALL]}, {"digits": family}).splitlines() == [
        "| test set | settings of the tables | superseded settings | the untuned recipe "
        "| still to come | all |",
        "| --- | --: | --: | --: | --: | --: |",
        "| digits | 1 | 2 | 1 | 8 | 12 |",
    ]


def test_empty_columns_are_left_out():
    difference = {"mean": -0.5, "low": -0.7, "high": -0.3, "p": 0.001}
    rows = [row("Neumann spectral", 93.5, ours=True, difference=difference), row("Muon", 94.0)]
    summary = {"model": "resnet9", "batch": 512, "best_peer": "Muon", "rows": rows}
    corrected = {Comparison(final_key("Neumann spectral", 512), final_key("Muon", 512)): 0.002}
    assert "p (Holm)" not in format_summary(summary)
    assert format_summary(summary, corrected).splitlines() == [
        "| optimizer | lr, decay, momentum | held out, % | tested, % | n | vs. best peer "
        "| p (Holm) |",
        "| --- | --- | --: | --: | --: | --: | --: |",
        "| Muon | 0.04, 2, 0.6 | 94.00 | 94.00 ± 0.10 | 5 |  |  |",
        "| **Neumann spectral** | 0.04, 2, 0.6 | 94.00 | 93.50 ± 0.10 | 5 "
        "| −0.50 [−0.70, −0.30] | 0.002 |",
    ]


def test_tables_go_between_their_marks(families):
    found = {"resnet9": [SMALL], "resnet18": [LARGE]}
    page = "a\n<!-- contest {} -->\nold\n| old |\n<!-- end of contest -->\nz"
    for name, expected in (
        ("overview", format_overview([SMALL])),
        ("forms", format_overview([{**SMALL, "rows": [row("Muon", 94.0)]}])),
        ("512", format_summary(SMALL)),
        ("resnet18 8192", format_summary(LARGE)),
    ):
        once = fill_page(page.format(name), found, families)
        assert once == page.format(name).replace("old\n| old |", expected)
        assert fill_page(once, found, families) == once


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_are_up_to_date(path, families):
    """If this fails, run python -m benchmarks.contest.update_pages."""
    page = path.read_text()
    assert list_parts(page, KIND)
    assert fill_page(page, json.loads(SUMMARY.read_text()), families) == page


def test_readme_is_up_to_date(families):
    """If this fails, run python -m benchmarks.contest.update_pages."""
    page = README.read_text()
    assert list_parts(page, KIND) == ["guide"]
    assert fill_readme(page, json.loads(SUMMARY.read_text()), families) == page


def test_figure_of_the_tested(tmp_path):
    """A single seed has no interval."""
    single = {"mean": 94.0, "low": None, "high": None, "n": 1, "diverged": 0}
    parts = [SMALL, {"batch": 8192, "rows": [row("Muon", 94.0, interval=single)]}, FURTHER]
    draw_contest(parts, tmp_path / "contest.png")
    assert (tmp_path / "contest.png").read_bytes().startswith(b"\x89PNG")
