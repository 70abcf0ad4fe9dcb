"""The recipe without tuning against tuned peers, on invented losses."""

import math

import pytest

from benchmarks.common.ledger import Ledger, Runner
from benchmarks.language import recipe_untuned
from benchmarks.language.language_runs import RunKey

pytestmark = pytest.mark.slow


def test_the_recipe_untuned_against_tuned_peers(tmp_path, capsys):
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)

    def lose(key):
        arm = key.setting.arm
        bottom = 2.0 if arm == "recipe" else 1.995 if "muon" in arm else 2.2
        away = abs(math.log2(key.setting.lr / 0.2)) if arm == "adamw" else 0.0  # a long way
        return {"loss": bottom + 0.01 * away + 0.0001 * math.sin(key.seed * len(arm))}

    recipe_untuned.train_all(Runner(ledger, lose))
    tuned = [key for key in ledger.runs if key.stage == "recipe" and key.setting.arm == "adamw"]
    assert len(tuned) == 2 * recipe_untuned.RUNS
    muon = [key for key in ledger.runs if key.stage == "recipe" and "muon" in key.setting.arm]
    assert 2 * recipe_untuned.RUNS < len(muon) <= 4 * recipe_untuned.RUNS
    assert 0.9 in {key.setting.before for key in muon}
    assert not [key for key in ledger.runs if key.stage == "recipe" and key.setting.arm == "recipe"]
    recipe_untuned.print_table(ledger)
    lines = capsys.readouterr().out.splitlines()
    assert sum("not worse" in line for line in lines) == 2 * len(recipe_untuned.PEERS)
    assert "+0.005" in next(line for line in lines if "muon by norm" in line)
