"""The recipe on images: nothing in it is tuned, and its peers get twelve runs each."""

import math

import pytest
import torch

from benchmarks.common.ledger import Runner
from benchmarks.contest import lr_by_network, recipe_comparisons, recipe_images
from benchmarks.contest.entrants import ContestLedger, RunKey, Setting, read_accuracy
from benchmarks.contest.image_families import load_families
from benchmarks.contest.recipe_runs import OURS, RecipeTrainer, make_recipe
from neumann import Neumann, param_groups
from neumann.lab.models.image_models import resnet9
from neumann.lab.training.learner import Learner
from neumann.lab.training.processes import Process
from neumann.optim.recipe import LR, choose_weight_decay


def test_the_lab_trains_what_large_batch_would():
    trainer = RecipeTrainer("digits", None)
    config = trainer.configure(RunKey("search", "mlp", 64, 10, OURS, make_recipe()))
    assert config.ramp_epochs == 0.3
    learner = Learner(config, Process())
    decay = choose_weight_decay(learner.model, learner.total_steps, LR)
    assert {group["lr"] for group in learner.optimizer.param_groups} == {LR}
    assert {group["weight_decay"] for group in learner.optimizer.param_groups} == {0.0, decay}
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


def test_the_best_rate_is_bracketed_and_gets_more_seeds(tmp_path, capsys):
    ledger = ContestLedger(tmp_path / "runs.jsonl")

    def score(key):
        best = {OURS: 0.05, lr_by_network.CANDIDATE: 0.03}.get(key.entrant, 0.0036)
        return {"accuracy": 90 - abs(math.log2(key.setting.lr / best)), "recalibrated": None}

    networks = [("resnet9", 8192)]
    lr_by_network.train_all(Runner(ledger, score), lr_by_network.ARMS, networks, seeds=3)
    ours = sorted((key.setting.lr, key.seed) for key in ledger.runs if key.entrant == OURS)
    assert ours == [(0.015, 0), *((lr, s) for lr in (0.03, 0.06) for s in range(3)), (0.12, 0)]
    lr_by_network.print_table(ledger)
    table = capsys.readouterr().out
    assert "| recipe | resnet9 | 8192 | 0.06 | 89.74 | 3 | 0.47 |" in table
    assert "| by elements | resnet9 | 8192 | 0.03 | 90.00 | 3 | 0.00 |" in table
    assert "| one for all | resnet9 | 8192 | 0.00375 | 89.94 | 3 | 2.00 |" in table


def test_the_candidate_makes_elements_equally_large():
    optimizer = Neumann(param_groups(resnet9(3, 10, width=8)), lr=0.03)
    lr_by_network.scale_by_elements(optimizer)
    sizes = []
    for group in optimizer.param_groups:
        if group["role"] == "hidden":
            gradients = [torch.randn_like(p) for p in group["params"]]
            directions = group["precondition"].apply(gradients, [{} for _ in gradients])
            sizes += [float(d.square().mean().sqrt()) for d in directions]
    assert len(sizes) == 8
    assert max(sizes) < 1.3 * min(sizes)  # singular values are 0.7 to 1.2


def test_every_comparison_with_a_tested_peer_is_listed():
    found = recipe_comparisons.list_comparisons()
    assert len(found) == 15
    muon = {c.task: c.lead for c in found if "muon" in c.peer.lower() and c.test == 2}
    assert len(muon) == 5
    assert all(lead.n == 10 and lead.low > 0 for lead in muon.values())
    on_text = [c for c in found if "text" in c.task]
    assert {c.family for c in on_text} == {len(on_text)}
    smallest = min(on_text, key=lambda c: c.lead.p)
    assert smallest.p == pytest.approx(len(on_text) * smallest.lead.p)
    for task, family in load_families().items():
        listed = [c for c in found if c.task == task]
        assert len(listed) == 3
        assert {c.family for c in listed} == {len(family)}
        assert {c.p for c in listed} <= set(family.correct().values())
    rows = recipe_comparisons.format_comparisons(found).splitlines()[3:]
    p_values = [[float(cell) for cell in row.strip("| ").split(" | ")[-3:-1]] for row in rows]
    assert all(p <= corrected for p, corrected in p_values)
