"""The search for rates and decay by role on images."""

import argparse

import pytest
from torch import nn

import neumann
from benchmarks.common.ledger import Ledger, Runner
from benchmarks.common.recipe_space import START
from benchmarks.contest import tune_image_roles
from benchmarks.contest.tune_image_roles import ImageTrainer, RunKey
from neumann.optim.preconditioners import Diagonal, Spectral

pytestmark = pytest.mark.slow


def test_a_run_trains_and_the_table_shows_it(tmp_path, capsys):
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)
    runner = Runner(ledger, ImageTrainer("digits", None).train)
    key = RunKey(
        "mlp", 128, 4, **{**START, "lr": 0.04, "forgetting": 0.3, "ramp": 0.03, "taps": 0.5}
    )
    assert runner.finish(key)["accuracy"] > 85
    arguments = argparse.Namespace(model="mlp", batch=128, epochs=4, rows=3)
    tune_image_roles.print_table(arguments, ledger)
    assert "| 0.04 | 0.3 |" in capsys.readouterr().out


def test_decay_follows_from_forgetting():
    trainer = ImageTrainer("digits", None)
    config = trainer._configure(
        RunKey("mlp", 128, 4, **{**START, "vector": 0.1, "ramp": 0.03, "taps": 0.5}),
        steps_per_epoch=10,
    )
    assert config.lr * config.weight_decay * 40 == pytest.approx(START["forgetting"])
    assert config.held_out
    named = "embedding=1.0,output=1.0,vector=2.0,output_p=diagonal,momentum=0.6,before=0.8"
    assert config.opt == f"neumann-spectral:{named}"


def test_eps_reaches_every_diagonal_preconditioner():
    optimizer, _ = neumann.large_batch(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), steps=10)
    tune_image_roles.change_eps(optimizer, 1e-5)
    found = [group["precondition"] for group in optimizer.param_groups]
    assert {p.eps for p in found if isinstance(p, Diagonal)} == {1e-5}
    assert any(isinstance(p, Spectral) for p in found)
