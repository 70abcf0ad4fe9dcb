"""What the large-batch contest trains and records, and that its results match its runs."""

import json
from pathlib import Path

import pytest

from benchmarks.common.ledger import Runner
from benchmarks.contest.entrants import ENTRANTS, ContestLedger, RunKey, Setting, read_accuracy
from benchmarks.contest.stages import Contest
from benchmarks.contest.trainer import Trainer
from neumann.lab.training.learner import Learner
from neumann.lab.training.processes import Process

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SEARCH = RunKey("search", "resnet9", 8192, 12, "Muon", Setting(0.04, 2.0, 0.6))
FINAL = RunKey("final", "resnet9", 512, 24, "schedule-free AdamW", Setting(0.01, 0.5, 0.9), seed=3)


def configure(key):
    return Trainer("digits", None).configure(key)


@pytest.mark.slow
def test_only_searches_are_scored_on_held_out_images():
    assert configure(SEARCH).held_out
    assert not configure(FINAL).held_out


@pytest.mark.parametrize("key", [SEARCH, FINAL], ids=lambda key: key.stage)
def test_a_run_follows_its_key(key):
    config = configure(key)
    assert (config.model, config.batch_size, config.epochs) == (key.model, key.batch, key.epochs)
    assert (config.lr, config.weight_decay) == (key.setting.lr, key.setting.decay)
    assert config.seed == key.seed
    assert config.ramp_epochs == key.epochs / 6
    assert config.opt == ENTRANTS[key.entrant].opt.format(momentum=key.setting.momentum)
    assert config.sched == ("linear" if key is SEARCH else "constant")


@pytest.mark.parametrize("name", ENTRANTS)
def test_settings_reach_every_optimizer(name):
    config = configure(RunKey("search", "mlp", 64, 6, name, Setting(0.125, 0.25, 0.6)))
    learner = Learner(config, Process())
    groups = [group for group in learner.optimizer.param_groups if group["weight_decay"]]
    assert groups
    for group in groups:
        momentum = group["momentum"] if "momentum" in group else group["betas"][0]
        assert (momentum, group["weight_decay"], group["lr"]) == (0.6, 0.25, 0.125)


def test_training_records_a_run(tmp_path):
    runner = Runner(ContestLedger(tmp_path / "runs.jsonl"), Trainer("digits", None).train)
    key = RunKey("final", "mlp", 64, 4, "SGD-Nesterov", Setting(0.1, 5e-4, 0.9), seed=1)
    run = runner.finish(key)
    assert read_accuracy(run) > 90
    assert run["steps"] == 4 * (1437 // 64)


@pytest.mark.slow
def test_results_match_the_runs():
    """results/large-batch.json can be computed from results/large-batch.jsonl."""
    found = Contest(ContestLedger(ROOT / "results/large-batch.jsonl")).summarize()
    written = json.loads((ROOT / "results/large-batch.json").read_text())
    assert close(json.loads(json.dumps(found)), written)


def close(ours, theirs):
    """Equal except for the last digits, which depend on the version of SciPy."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(close(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(close, ours, theirs))
    return ours == (pytest.approx(theirs, rel=1e-6) if isinstance(ours, float) else theirs)
