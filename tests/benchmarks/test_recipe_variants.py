"""Variants of the recipe on held-out images."""

from dataclasses import replace

import pytest

from benchmarks.common.ledger import Ledger, Runner
from benchmarks.contest import recipe_variants
from benchmarks.contest.entrants import RunKey as EntrantKey
from benchmarks.contest.recipe_runs import OURS, RecipeTrainer, make_recipe
from benchmarks.contest.recipe_variants import TODAY, RunKey, Variant, VariantTrainer

KEY = EntrantKey("search", "resnet9", 8192, 24, OURS, make_recipe())


def configure(arm, data="cifar10"):
    trainer = VariantTrainer(data, None)
    trainer._arm = arm
    return trainer.configure(KEY)


def test_variants_differ_from_the_recipe_in_what_they_say():
    usual = RecipeTrainer("cifar10", None).configure(KEY)
    assert usual.opt == "neumann-spectral:weight_decay=auto"
    assert usual.held_out
    assert recipe_variants.VARIANTS[TODAY] == Variant("before=0.6")
    for arm, options in (
        ("momentum 0.6, output × 2", "before=0.6,output=2"),
        ("momentum 0.6, output by class", "before=0.6,output=1"),
        ("momentum 0.8, decayed vectors", "before=0.8,decay_norms=true"),
    ):
        assert configure(arm) == replace(usual, opt=f"{usual.opt},{options}")
    by_class = configure("momentum 0.8, output by class × 2", "cifar100")
    assert by_class.opt.endswith(",output=0.6325")
    assert configure("momentum 0.8, long ramp").ramp_epochs == 4.0


@pytest.mark.slow
def test_runs_and_their_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recipe_variants, "BATCH", 256)
    monkeypatch.setattr(recipe_variants, "EPOCHS", 2)
    monkeypatch.setitem(recipe_variants.VARIANTS, "no ramp", Variant(ramp=0.0))
    monkeypatch.setattr(recipe_variants, "ARMS", (TODAY, "no ramp"))
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)
    runner = Runner(ledger, VariantTrainer("digits", None).train_arm)
    for arm in recipe_variants.ARMS:
        runner.run(RunKey("digits", "mlp", arm))
    capsys.readouterr()
    recipe_variants.print_table(ledger)
    table = capsys.readouterr().out
    assert f"| digits | mlp | {TODAY} | 1 |" in table
    assert "| digits | mlp | no ramp | 1 |" in table
