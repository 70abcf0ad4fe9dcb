"""The study of the leads, on invented losses: what is selected, confirmed and shown."""

import math
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.common.ledger import Ledger, MissingRunError, Runner
from benchmarks.language import leads as study
from benchmarks.language.language_runs import RunKey
from benchmarks.language.language_variants import (
    COOLING,
    MUON,
    RECIPE,
    VARIANTS,
)
from benchmarks.language.leads import Leads, format_leads

# What each lead gains on invented losses, at its best strength.
GAINS = {"whitening": 0.02, "cooling": 0.004, "fixed norm": 0.0005, "cautious decay": -0.01}


def invent(key):
    s = key.setting
    name, strength = (s.lead, s.strength) if s.lead else ("cooling", s.cooling)
    loss = 2.0 + 0.0002 * math.sin(99 * key.seed + len(name) + strength)
    if strength:
        best = list(VARIANTS[name].strengths)[1]
        loss -= GAINS.get(name, -0.02) - 0.003 * (strength != best)
    if s.arm == MUON:
        loss += 0.01 * math.log2(s.lr / 0.032) ** 2
    if name == "cooling" and s.cooling and key.steps == 400:
        loss += 0.01  # does not last
    return {"loss": loss}


@pytest.fixture
def leads(tmp_path):
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)
    return Leads(RECIPE, ledger, Runner(ledger, invent))


def test_leads_that_were_ahead_are_confirmed_with_fresh_seeds(leads):
    leads.run("select")
    choices = {choice.name: choice for choice in leads.find_choices()}
    assert set(choices) == set(VARIANTS)
    assert choices["whitening"].strength == 0.3
    assert [choice.name for choice in leads.find_finalists()] == ["whitening", "cooling"]
    assert "to be confirmed" in format_leads(leads)
    leads.run("confirm")
    confirmed = [key for key in leads.ledger.runs if key.stage == "confirm"]
    assert len(confirmed) == 2 * len(study.CONFIRM_SEEDS) * 3  # lengths, seeds, settings
    selected = {key.seed for key in leads.ledger.runs if key.stage == "select"}
    assert not selected & {key.seed for key in confirmed}
    for key in leads.ledger.runs:
        assert key.setting.lr * key.setting.decay * key.steps == pytest.approx(2.5)
    lines = {line.split("|")[1].strip(): line for line in format_leads(leads).splitlines()}
    assert "holds up" in lines["whitening"]
    assert "not confirmed" in lines["cooling"]
    assert "not chosen" in lines["fixed norm"]
    assert "control" in lines["control: decay"].split("|")[-2]
    assert "+0.0" in lines["whitening"]


def test_a_comparison_counts_when_others_have_overtaken_the_lead(leads, monkeypatch):
    leads.run("confirm")
    before = format_leads(leads)
    monkeypatch.setattr(study, "FINALISTS", 1)
    after = format_leads(leads)
    assert "| not confirmed |" in before
    assert after == before  # with all its p values
    longest = study.CONFIRM_STEPS[-1]
    runs = leads.ledger.runs
    leads.ledger.runs = {key: run for key, run in runs.items() if key.steps != longest}
    lines = {line.split("|")[1].strip(): line for line in format_leads(leads).splitlines()}
    assert "| to be confirmed |" in lines["whitening"]
    assert "| overtaken |" in lines["cooling"]


def test_muon_is_tuned_first_and_has_leads_of_its_own(tmp_path):
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)
    leads = Leads(MUON, ledger, Runner(ledger, invent))
    assert format_leads(leads) == ""
    leads.run("confirm")
    searched = [key for key in ledger.runs if key.stage == "search"]
    assert 8 < len(searched) <= study.SEARCH_RUNS
    assert leads.find_base(100).lr == 0.032
    assert leads.find_base(400).decay == leads.find_base(100).decay / 4
    assert not [key for key in ledger.runs if key.setting.lead == "even rows"]
    assert "| whitening |" in format_leads(leads)


def test_a_diverged_variant_is_not_chosen(tmp_path):
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)

    def diverge(key):
        return {"loss": None} if key.setting.lead == "whitening" else invent(key)

    leads = Leads(RECIPE, ledger, Runner(ledger, diverge))
    leads.run("confirm")
    assert not [
        key for key in ledger.runs if key.stage == "confirm" and key.setting.lead == "whitening"
    ]


def test_a_lead_that_diverges_once_loses(tmp_path):
    """The seeds that are left must not speak for it."""
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)

    def diverge(key):
        lost = key.setting.lead == "whitening" and key.seed == 1
        return {"loss": None} if lost else invent(key)

    leads = Leads(RECIPE, ledger, Runner(ledger, diverge))
    leads.run("select")
    assert "whitening" not in [choice.name for choice in leads.find_finalists()]


def test_a_lead_must_gain_more_than_the_controls(tmp_path):
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)

    def favor(key):
        gain = 0.05 * (key.setting.lead == "control: decay")
        return {"loss": invent(key)["loss"] - gain}

    leads = Leads(RECIPE, ledger, Runner(ledger, favor))
    leads.run("select")
    assert leads.find_finalists() == []


def test_the_time_may_run_out(tmp_path):
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)
    with pytest.raises(MissingRunError):
        Leads(RECIPE, ledger, Runner(ledger, invent, seconds=0)).run("select")


def test_some_leads_alone_can_be_trained(tmp_path):
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)
    Leads(RECIPE, ledger, Runner(ledger, invent), only=["even rows"]).run("select")
    assert {key.setting.lead for key in ledger.runs} == {"", "even rows"}
    leads = Leads(RECIPE, ledger, Runner(ledger, invent), only=["whitening"])
    leads.run("select")
    assert {choice.name for choice in leads.find_choices()} == {"even rows", "whitening"}


def test_some_finalists_alone_can_be_confirmed(tmp_path):
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)
    Leads(RECIPE, ledger, Runner(ledger, invent)).run("select")
    leads = Leads(RECIPE, ledger, Runner(ledger, invent), only=["whitening"])
    assert len(leads.find_finalists()) > 1
    leads.run("confirm")
    confirmed = {key.setting.lead for key in ledger.runs if key.stage == "confirm"}
    assert confirmed == {"", "whitening"}


def test_what_the_page_says_was_not_tried():
    """docs/ablations.md lists it. What is run one day must leave the list."""
    keys = set(Ledger(Path(__file__).parents[2] / study.RESULTS, RunKey).runs)
    ours = [key for key in keys if key.setting.arm == RECIPE]
    confirmed = {steps: set() for steps in study.CONFIRM_STEPS}
    for key in ours:
        if key.stage == "confirm" and key.setting.lead:
            confirmed[key.steps].add(key.setting.lead)
    assert len(confirmed[200]) == 12
    assert confirmed[200] - confirmed[400] == {
        "power cooldown",
        "cautious decay",
        "whitening, slow momentum",
        "whitening, slow, cautious",
        "rotated output, power cooldown",
        "whitened output",
    }
    tried = {key.setting.lead for key in ours} - {""}
    assert set(VARIANTS) - tried - {COOLING} == {
        "power cooldown, cautious",
        "late cooldown",
        "left whitening, slow sum",
    }
    extrapolated = {name for name in tried if name.startswith("extrapolation")}
    assert extrapolated == {"extrapolation 0.9", "extrapolation 0.97"}
    muon = [key for key in keys if key.setting.arm == MUON and key.setting.lead]
    assert {key.stage for key in muon} == {"select"}
    assert not any(key.setting.lead.startswith(study.CONTROL) for key in muon)
    seeds = Counter(lead for lead, _ in {(key.setting.lead, key.seed) for key in muon})
    assert sorted(lead for lead, count in seeds.items() if count == 1) == [
        "slow momentum 0.98",
        "whitening, slow, cautious",
    ]
