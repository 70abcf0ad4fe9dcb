"""Variants of the recipe on held-out images."""

from dataclasses import replace

import pytest

from benchmarks.common.ledger import Ledger, Runner
from benchmarks.contest import recipe_variants
from benchmarks.contest.entrants import RunKey as EntrantKey
from benchmarks.contest.recipe_runs import OURS, make_recipe
from benchmarks.contest.recipe_variants import RunKey, Variant, VariantTrainer


def configure(arm, data="cifar10"):
    trainer = VariantTrainer(data, None)
    trainer._arm = arm
    key = EntrantKey("search", "resnet9", 8192, 24, OURS, make_recipe())
    return trainer.configure(key)


def test_variants_differ_from_the_recipe_in_what_they_say():
    usual = configure(OURS)
    assert usual.opt == "neumann-spectral:weight_decay=auto"
    assert usual.held_out
    for arm, options in (
        ("output × 2", "output=2"),
        ("output by class", "output=1"),
        ("decayed vectors", "decay_norms=true"),
    ):
        assert configure(arm) == replace(usual, opt=f"{usual.opt},{options}")
    assert configure("output by class × 2", "cifar100").opt.endswith(",output=0.6325")
    assert configure("long ramp") == replace(usual, ramp_epochs=4.0)


@pytest.mark.slow
def test_runs_and_their_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recipe_variants, "BATCH", 256)
    monkeypatch.setattr(recipe_variants, "EPOCHS", 2)
    monkeypatch.setitem(recipe_variants.VARIANTS, "no ramp", Variant(ramp=0.0))
    monkeypatch.setattr(recipe_variants, "ARMS", (OURS, "no ramp"))
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)
    runner = Runner(ledger, VariantTrainer("digits", None).train_arm)
    for arm in recipe_variants.ARMS:
        runner.run(RunKey("digits", "mlp", arm))
    capsys.readouterr()
    recipe_variants.print_table(ledger)
    table = capsys.readouterr().out
    assert "| digits | mlp | recipe | 1 |" in table
    assert "| digits | mlp | no ramp | 1 |" in table
