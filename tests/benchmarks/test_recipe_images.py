"""The recipe on images: nothing in it is tuned, and its peers get twelve runs each."""

import math

import pytest

from benchmarks.common.ledger import Runner
from benchmarks.contest import lr_by_network, recipe_images
from benchmarks.contest.entrants import ContestLedger, RunKey, Setting, read_accuracy
from benchmarks.contest.recipe_runs import OURS, RecipeTrainer, make_recipe
from neumann.lab.training.loop import Training
from neumann.lab.training.processes import Process
from neumann.optim.recipe import LR, choose_weight_decay


def test_the_lab_trains_what_large_batch_would():
    trainer = RecipeTrainer("digits", None)
    config = trainer.configure(RunKey("search", "mlp", 64, 10, OURS, make_recipe()))
    assert config.ramp_epochs == 0.3
    training = Training(config, Process())
    decay = choose_weight_decay(training.model, training.total_steps, LR)
    assert {group["lr"] for group in training.optimizer.param_groups} == {LR}
    assert {group["weight_decay"] for group in training.optimizer.param_groups} == {0.0, decay}
    peer = RunKey("final", "mlp", 64, 12, "Muon", Setting(0.04, 2.0, 0.6))
    assert trainer.configure(peer).ramp_epochs == 2


@pytest.mark.slow
def test_a_run_of_the_recipe(tmp_path):
    runner = Runner(ContestLedger(tmp_path / "runs.jsonl"), RecipeTrainer("digits", None).train)
    assert read_accuracy(runner.finish(RunKey("final", "mlp", 64, 4, OURS, make_recipe()))) > 95


def test_tuned_peers_and_the_untuned_recipe(tmp_path, capsys):
    ledger = ContestLedger(tmp_path / "runs.jsonl")

    def score(key):
        best = {OURS: 94.0, "Muon": 94.1, "AdamW": 94.5}[key.entrant]
        away = abs(math.log2(key.setting.lr / 0.02)) if key.entrant == "AdamW" else 0.0
        accuracy = best - 0.1 * away + 0.01 * math.sin(key.seed * len(key.entrant))
        return {"accuracy": accuracy, "recalibrated": None}

    recipe_images.train_all(Runner(ledger, score), range(20, 30))
    searched = [key for key in ledger.runs if key.stage == "search"]
    assert len([key for key in searched if key.entrant == "AdamW"]) == recipe_images.RUNS
    assert not [key for key in searched if key.entrant == OURS]
    recipe_images.print_table(ledger, range(20, 30))
    lines = capsys.readouterr().out.splitlines()
    assert "+0.10" in next(line for line in lines if "| Muon" in line and "not worse" in line)
    assert "may be worse" in next(line for line in lines if "| AdamW" in line)


def test_the_best_rate_is_bracketed(tmp_path, capsys):
    ledger = ContestLedger(tmp_path / "runs.jsonl")

    def score(key):
        best = 0.06 if key.entrant == OURS else 0.00375
        return {"accuracy": 90 - abs(math.log2(key.setting.lr / best)), "recalibrated": None}

    runner, network = Runner(ledger, score), lr_by_network.NETWORKS[0]
    assert [lr_by_network.tune(runner, arm, network) for arm in lr_by_network.ARMS] == [1, -2]
    lr_by_network.print_table(ledger)
    table = capsys.readouterr().out
    assert "| recipe | resnet9 | 8192 | 0.06 | 90.00 | 1.00 |" in table
    assert "| one for all | resnet9 | 8192 | 0.00375 | 90.00 | 2.00 |" in table
