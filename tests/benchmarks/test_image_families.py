"""Every comparison on the test set of CIFAR-10 or CIFAR-100 is in the family that p is for."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.contest import recipe_comparisons
from benchmarks.contest.entrants import ContestLedger, RunKey, Setting
from benchmarks.contest.image_families import (
    CIFAR10,
    CIFAR100,
    OTHER_FORMS,
    PLANNED_ON_CIFAR100,
    Comparison,
    compare_tested,
    find_cifar10,
    find_cifar100,
    load_families,
)
from benchmarks.contest.recipe_runs import OURS
from benchmarks.contest.summary import find_tested

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def families():
    return load_families(ROOT / "results")


@pytest.fixture
def add(tmp_path):
    """Adds final runs to a new ledger, one for each accuracy."""
    ledger = ContestLedger(tmp_path / "runs.jsonl")

    def add(entrant, lr, accuracies, first_seed=0, batch=512):
        for seed, accuracy in enumerate(accuracies, start=first_seed):
            key = RunKey("final", "resnet9", batch, 24, entrant, Setting(lr, 0.5, 0.6), seed)
            ledger.add(key, {"accuracy": accuracy, "recalibrated": None})
        return ledger

    return add


def read_final_keys(name):
    lines = (ROOT / "results" / name).read_text().splitlines()
    keys = [json.loads(line)["key"] for line in lines]
    return [key for key in keys if key["stage"] == "final"]


def count_settings(name):
    """How many settings of each optimizer were tested, by network and batch size."""
    counts = {}
    for key in read_final_keys(name):
        setting = tuple(sorted(key["setting"].items()))
        counts.setdefault((key["model"], key["batch"]), set()).add((key["entrant"], setting))
    return [Counter(entrant for entrant, _ in found) for found in counts.values()]


def count_recipe_comparisons(name):
    found = {(key["entrant"], key["seed"] // 10) for key in read_final_keys(name)}
    return sum(entrant != "recipe" for entrant, _ in found)


def test_every_pair_of_tested_settings_counts(families):
    """Counted from the files alone, superseded settings included."""
    on_cifar10 = count_recipe_comparisons(CIFAR10[1])
    for tested in count_settings(CIFAR10[0]):
        on_cifar10 += tested["Muon"] * (tested.total() - tested["Muon"])
        on_cifar10 += sum(tested[ours] * tested[rival] for ours, rival in OTHER_FORMS.items())
    assert len(families["CIFAR-10"]) == len(families["CIFAR-10"].leads) == on_cifar10
    made = count_recipe_comparisons(CIFAR100[1])
    for tested in count_settings(CIFAR100[0]):
        made += tested["Neumann spectral"] * (tested.total() - tested["Neumann spectral"])
    assert len(families["CIFAR-100"].leads) == made


def test_the_family_holds_every_published_comparison(families):
    family = families["CIFAR-10"]
    contest = json.loads((ROOT / "results/large-batch.json").read_text())
    published = {}
    for summary in (summary for summaries in contest.values() for summary in summaries):
        peer = find_tested(summary, summary["best_peer"])
        for row in summary["rows"]:
            if row["difference"]:
                found = Comparison(find_tested(summary, row["entrant"]), peer)
                published[found] = row["difference"]
        if summary["model"] == "resnet9":
            for pair in OTHER_FORMS.items():
                published[Comparison(*(find_tested(summary, name) for name in pair))] = None
    assert len(published) == 37 + 8
    assert published.keys() <= family.leads.keys()
    for found, difference in published.items():
        if difference is not None:
            assert family.leads[found].p == pytest.approx(difference["p"], rel=1e-6)
    for name, each in families.items():
        of_recipe = {
            (c.ours.seed // 10, c.rival.entrant) for c in each.leads if c.ours.entrant == OURS
        }
        assert of_recipe == {(1, "Muon"), (1, "AdamW"), (2, "Muon")}, name


def test_a_superseded_setting_counts_beside_every_setting_of_its_rival(add):
    add("Muon", 0.02, [94.0, 94.1, 94.3])
    add("Muon", 0.005, [94.1, 94.3, 94.2])
    add("Neumann spectral", 0.015, [94.5, 94.4, 94.7])
    contest = add("Neumann spectral", 0.03, [93.0])
    add("AdamW", 0.004, [93.9, 93.5, 93.2])
    add("LAMB", 0.004, [90.0, 90.0], batch=2048)  # without a rival
    family = find_cifar10(contest, ContestLedger(Path("none.jsonl")))
    assert len(family) == 6
    settings = Counter((c.ours.entrant, c.ours.setting.lr) for c in family.leads)
    assert set(settings.values()) == {2}
    assert {c.rival.entrant for c in family.leads} == {"Muon"}
    corrected = family.correct()
    once = next(c for c in family.leads if c.ours.setting.lr == 0.03)
    assert family.leads[once].n == 1
    assert corrected[once] == 1
    smallest = min((c for c in family.leads if family.leads[c].p), key=lambda c: family.leads[c].p)
    assert corrected[smallest] == pytest.approx(6 * family.leads[smallest].p)


def test_tests_with_other_seeds_are_two_comparisons(add):
    add("recipe", 0.03, [94.0, 94.1], first_seed=10)
    add("Muon", 0.02, [94.2, 94.2], first_seed=10)
    add("recipe", 0.03, [94.5, 94.7], first_seed=20)
    recipe = add("Muon", 0.02, [94.1, 94.2], first_seed=20)
    family = find_cifar10(ContestLedger(Path("none.jsonl")), recipe)
    means = {c.ours.seed: lead.mean for c, lead in family.leads.items()}
    assert means == {10: pytest.approx(-0.15), 20: pytest.approx(0.45)}


def test_settings_without_a_common_seed_are_not_compared(add):
    add("Neumann spectral", 0.03, [94.0, 94.1])
    ledger = add("Muon", 0.02, [94.2, 94.2], first_seed=5)
    assert not compare_tested(ledger, lambda ours, rival: True)


def test_planned_comparisons_count_before_they_are_made(add):
    nothing = ContestLedger(Path("none.jsonl"))
    assert len(find_cifar100(nothing, nothing)) == PLANNED_ON_CIFAR100
    add("Neumann spectral", 0.03, [76.0, 76.2, 76.1])
    ledger = add("Muon", 0.02, [75.0, 75.1, 75.2])
    family = find_cifar100(ledger, nothing)
    (found,) = family.leads
    assert len(family) == PLANNED_ON_CIFAR100
    assert family.correct()[found] == pytest.approx(PLANNED_ON_CIFAR100 * family.leads[found].p)


def make_key(batch, entrant, *setting):
    return RunKey("final", "resnet9", batch, 24, entrant, Setting(*setting))


def test_sentences_agree_with_the_families(families):
    """Pages say by hand how many comparisons there are, and p of the leads that they speak of."""
    contests, start, choosing = (
        " ".join((ROOT / name).read_text().split())
        for name in ("docs/contests.md", "docs/index.md", "docs/choosing-a-form.md")
    )
    of_recipe = recipe_comparisons.list_comparisons(ROOT / "results")
    over_muon = {c.task: c.p for c in of_recipe if c.test == 2}
    counts = tuple(str(len(family)) for family in families.values())
    for page in (contests, start):
        found = re.findall(r"(\d+) comparisons on CIFAR-10 and (?:all )?(\d+) on CIFAR-100", page)
        assert found == [counts]
        assert set(re.findall(r"(\d+) comparisons on CIFAR-10\b", page)) == {counts[0]}
        assert all(f"p = {over_muon[name]:.2g}" in page for name in families)
    assert over_muon["CIFAR-100"] < 0.05 < over_muon["CIFAR-10"]
    elsewhere = [c for c in of_recipe if "text" in c.task or c.peer == "AdamW"]
    assert all(c.p < 0.001 for c in elsewhere)
    corrected = families["CIFAR-10"].correct()
    muon = make_key(512, "Muon", 0.005, 0.5, 0.6)
    ahead = corrected[Comparison(make_key(512, "Neumann spectral", 0.00375, 1.25, 0.6), muon)]
    assert f"2.2e-8, or {ahead:.1e} corrected".replace("e-0", "e-") in contests
    muon = make_key(8192, "Muon", 0.04, 2.0, 0.6)
    behind = corrected[Comparison(make_key(8192, "Neumann spectral", 0.03, 2.0, 0.6), muon)]
    assert f"p = 0.016, or {behind:.2g} corrected" in contests
    adamw = make_key(16384, "AdamW", 0.001, 0.05, 0.6)
    lead = corrected[Comparison(make_key(16384, "Neumann diagonal", 0.00125, 0.1, 0.9), adamw)]
    assert f"not significant after correction (p = {lead:.2g})" in contests
    assert f"not significant (p = {lead:.2g})" in choosing
    assert ahead < 0.05 < min(behind, lead)
