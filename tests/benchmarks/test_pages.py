"""The contest's tables in README and docs."""

import json
import re
from dataclasses import replace

import pytest
from PIL import Image

from benchmarks.common.pages import list_parts
from benchmarks.contest.draw_figure import FOR_README, draw_contest
from benchmarks.contest.entrants import ContestLedger, RunKey, Setting, read_accuracy
from benchmarks.contest.form_guide import find_lrs
from benchmarks.contest.image_families import (
    CIFAR10,
    CIFAR100,
    RESULTS,
    Comparison,
    Family,
    find_cifar10,
    load_families,
)
from benchmarks.contest.markdown_tables import (
    HEADS,
    NOT_ON_PAGES,
    format_by_batch,
    format_families,
    format_overview,
    format_pairs,
    format_summary,
)
from benchmarks.contest.update_pages import KIND, PAGES, README, SUMMARY, fill_page, fill_readme
from neumann.lab.studies.statistics import mean_interval, paired_difference


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
        "| batch | Neumann diagonal over AdamW, points |",
        "| --: | --: |",
        f"| 512 | {cell} |",
        f"| 2048 | {cell} |",
        "| 8192 |  |",
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


def test_a_column_can_be_left_out():
    lrs = {"low": 0.02, "high": 0.08}
    rows = [row("Muon", 94.0, seconds=9.0, range=lrs, with_training_statistics=93.0)]
    summary = {"model": "resnet9", "batch": 512, "best_peer": "Muon", "rows": rows}
    heads = [head for head in HEADS if head in format_summary(summary)]
    assert set(heads) > NOT_ON_PAGES
    short = format_summary(summary, leave_out=NOT_ON_PAGES).splitlines()
    assert short[0] == "| optimizer | lr, decay, momentum | held out, % | tested, % | n |"


def test_a_number_at_all_batch_sizes():
    """In the order of the overview; a column where nothing is known is left out."""
    found = {
        "resnet9": [
            {**SMALL, "rows": [row("LAMB", 93.0, seconds=9.25), row("Muon", 94.0)]},
            LARGE,
        ],
        "resnet18": [{**LARGE, "rows": [row("Muon", 93.0, seconds=20.0)]}],
    }
    assert format_by_batch(found, "seconds", "{:.1f}", "seconds per run").splitlines() == [
        "| seconds per run | batch 512 | ResNet-18, batch 8192 |",
        "| --- | --: | --: |",
        "| Muon |  | 20.0 |",
        "| LAMB | 9.2 |  |",
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


def read_flat(name):
    """A page without line breaks."""
    (path,) = (path for path in (*PAGES, README) if path.name == name)
    return " ".join(path.read_text().split())


def find_adamw(name):
    """Setting and accuracy of AdamW after its search in as many steps as the test has."""
    runs = ContestLedger(RESULTS / name).runs
    tested = {k: read_accuracy(run) for k, run in runs.items() if k.stage == "final"}
    found = {key: score for key, score in tested.items() if key.entrant == "AdamW"}
    (setting,) = {key.setting for key in found}
    return setting, mean_interval(list(found.values()))


def test_the_pages_say_how_adamw_was_tuned():
    """The contest has another number for it, because its search had fewer steps."""
    setting, accuracy = find_adamw(CIFAR10[1])
    summaries = {s["batch"]: s for s in json.loads(SUMMARY.read_text())["resnet9"]}
    means = {
        (batch, row["entrant"]): row["interval"]["mean"]
        for batch, summary in summaries.items()
        for row in summary["rows"]
    }
    longer, shorter = accuracy.mean, means[8192, "AdamW"]
    interval = f"{longer:.2f} ± {accuracy.high - longer:.2f}"
    contests, form = read_flat("contests.md"), read_flat("choosing-a-form.md")
    assert f"({setting.lr:.3g}, {setting.decay:g}, {setting.momentum:g})" in contests
    assert f"this reached {interval} on the test set" in contests
    assert f"by {longer - shorter:.1f} points" in contests
    lost = [means[512, "AdamW"] - mean for mean in (shorter, longer)]
    assert f"loses {lost[0]:.1f} from 512 to 8192, or {lost[1]:.1f} if" in contests
    assert f"AdamW reached {interval}" in form
    assert f"LAMB ({means[8192, 'LAMB']:.2f})" in form
    start = read_flat("index.md")
    assert f"it has {longer:.2f} % in the table and {shorter:.2f} % in the figure" in start
    on_cifar100 = find_adamw(CIFAR100[1])[1].mean
    assert f"it reached [{on_cifar100:.2f}]" in contests


def test_readme_claims_no_lead_over_adamw():
    """The seeds of the two differ, so there is no p."""
    mean = find_adamw(CIFAR10[1])[1].mean
    (row,) = (line for line in README.read_text().splitlines() if line.startswith("| **diagonal"))
    assert f"; AdamW {mean:.2f}," in row
    assert "p =" not in row


@pytest.mark.parametrize("name", ["README.md", *(path.name for path in PAGES)])
def test_who_was_tuned_twice_is_said(name):
    assert re.search(r"tuned by the same rules\b.*\bonce more at full length", read_flat(name))


def test_the_pages_agree_on_the_rates_of_the_papers_form():
    lrs = find_lrs(json.loads(SUMMARY.read_text())["resnet9"], "Neumann (paper)")
    for name in ("README.md", "choosing-a-form.md"):
        assert f"| lr {lrs['lowest']:g} to {lrs['highest']:g}" in read_flat(name)


def test_the_ranges_of_learning_rates_are_in_a_sentence():
    """The tables leave them out."""
    summaries = json.loads(SUMMARY.read_text())["resnet9"]
    found = [r["range"] for s in summaries for r in s["rows"] if r["range"]]
    assert len(found) == 2
    for lrs in found:
        assert f"{lrs['low']:.3g} to {lrs['high']:.3g}, " in read_flat("contests.md")
        assert lrs["octaves"] == pytest.approx(2.0)  # "a factor of 4"


def test_figure_of_the_tested(tmp_path):
    """A single seed has no interval."""
    single = {"mean": 94.0, "low": None, "high": None, "n": 1, "diverged": 0}
    parts = [SMALL, {"batch": 8192, "rows": [row("Muon", 94.0, interval=single)]}, FURTHER]
    draw_contest(parts, tmp_path / "contest.png")
    assert (tmp_path / "contest.png").read_bytes().startswith(b"\x89PNG")


def test_readme_has_the_small_figure(tmp_path):
    """Drawn for the width at which README shows it, three dots to a pixel."""
    draw_contest([SMALL, LARGE], tmp_path / "small.png", FOR_README)
    width = int(re.search(r'large-batch\.png".* width="(\d+)"', README.read_text())[1])
    for path in (tmp_path / "small.png", RESULTS / "large-batch.png"):
        with Image.open(path) as picture:
            assert picture.width == 3 * width
