"""What the large-batch contest trains and records, and that its results are those of its runs."""

import argparse
import json
from pathlib import Path

import pytest
from contest import ENTRANTS
from large_batch import Contest, Trainer, steps_to
from ledger import Key, Ledger, Setting

from neumann.lab.processes import Process
from neumann.lab.training import Training

ROOT = Path(__file__).parents[1]
SEARCH = Key("search", "resnet9", 8192, 12, "Muon", Setting(0.04, 2.0, 0.6))
FINAL = Key("final", "resnet9", 512, 24, "schedule-free AdamW", Setting(0.01, 0.5, 0.9), seed=3)


def arguments_for():
    given = {"data": "digits", "data_dir": None, "seconds": 600.0, "share": None, "epochs": None}
    return argparse.Namespace(**given, once=False)


def config_of(key):
    return Trainer(None, arguments_for())._config(key)


def test_searches_are_held_out_and_tests_are_not():
    assert config_of(SEARCH).held_out
    assert not config_of(FINAL).held_out


@pytest.mark.parametrize("key", [SEARCH, FINAL], ids=lambda key: key.stage)
def test_a_run_is_what_its_key_says(key):
    config = config_of(key)
    assert (config.model, config.batch_size, config.epochs) == (key.model, key.batch, key.epochs)
    assert (config.lr, config.weight_decay) == (key.setting.lr, key.setting.decay)
    assert config.seed == key.seed
    assert config.ramp_epochs == key.epochs / 6
    assert config.opt == ENTRANTS[key.entrant].opt.format(momentum=key.setting.momentum)
    assert config.sched == ("linear" if key is SEARCH else "constant")


@pytest.mark.parametrize("name", ENTRANTS)
def test_a_setting_gets_to_every_optimizer(name):
    config = config_of(Key("search", "mlp", 64, 6, name, Setting(0.125, 0.25, 0.6)))
    training = Training(config, Process())
    groups = [group for group in training.optimizer.param_groups if group["weight_decay"]]
    assert groups
    for group in groups:
        momentum = group["momentum"] if "momentum" in group else group["betas"][0]
        assert (momentum, group["weight_decay"], group["lr"]) == (0.6, 0.25, 0.125)


def test_a_run_is_trained_and_recorded(tmp_path):
    ledger = Ledger(tmp_path / "runs.jsonl", {})
    trainer = Trainer(ledger, arguments_for())
    key = Key("final", "mlp", 64, 4, "SGD-Nesterov", Setting(0.1, 5e-4, 0.9), seed=1)
    assert trainer.score(key) > 90
    run = ledger.runs[key]
    assert run["steps"] == 4 * (1437 // 64)
    assert run["steps_to_target"] in {k * run["steps"] // 4 for k in (2, 4)}


def test_steps_to_an_accuracy_are_those_of_the_first_epoch_there(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    lines = [
        {"kind": "step", "step": 1, "accuracy": 99.0},
        {"kind": "epoch", "step": 10, "accuracy": 95.0, "accuracy_recalibrated": 89.9},
        {"kind": "epoch", "step": 15},
        {"kind": "epoch", "step": 20, "accuracy": 50.0, "accuracy_recalibrated": 90.0},
        {"kind": "epoch", "step": 30, "accuracy": 92.0, "accuracy_recalibrated": None},
    ]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert steps_to(90.0, metrics) == 20
    assert steps_to(91.0, metrics) == 30
    assert steps_to(93.0, metrics) is None


def test_the_results_are_those_of_the_runs():
    """results/large-batch.json from results/large-batch.jsonl."""
    ledger = Ledger(ROOT / "results/large-batch.jsonl", {})
    found = Contest(ledger, None, arguments_for()).found()
    written = json.loads((ROOT / "results/large-batch.json").read_text())
    assert close(json.loads(json.dumps(found)), written)


def close(ours, theirs):
    """The same but for the last digits, which depend on SciPy's version."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(close(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(close, ours, theirs))
    return ours == (pytest.approx(theirs, rel=1e-6) if isinstance(ours, float) else theirs)
