"""The ledger of runs, and how processes share work through it."""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks.common.ledger import Ledger, MissingRunError, Runner, claim, refuse_other_data

ROOT = Path(__file__).parents[2]
HOLDER = """
import sys, time
from pathlib import Path
from benchmarks.common.ledger import claim
from tests.benchmarks.test_ledger import KEY
with claim(Path(sys.argv[1]), KEY) as claimed:
    print(claimed, flush=True)
    time.sleep(60)
"""


@dataclass(frozen=True)
class Inner:
    lr: float


@dataclass(frozen=True)
class Key:
    name: str
    inner: Inner
    seed: int = 0


KEY = Key("a", Inner(0.1))


def test_processes_share_a_ledger(tmp_path):
    path = tmp_path / "runs.jsonl"
    ours, theirs = Ledger(path, Key, {"commit": "a"}), Ledger(path, Key, {"commit": "b"})
    with pytest.raises(MissingRunError):
        theirs.find(KEY)
    ours.add(KEY, {"accuracy": 80.0})
    theirs.refresh()
    assert theirs.find(KEY) == Ledger(path, Key).find(KEY)
    assert theirs.find(KEY)["accuracy"] == 80.0
    assert theirs.find(KEY)["commit"] == "a"


def test_runs_are_not_repeated(tmp_path):
    ledger, trained = Ledger(tmp_path / "runs.jsonl", Key), []
    runner = Runner(ledger, lambda key: trained.append(key) or {"accuracy": 1.0})
    assert runner.finish(KEY)["accuracy"] == 1.0
    runner.run(KEY)
    assert trained == [KEY]


def test_no_run_starts_after_the_time_is_up(tmp_path):
    runner = Runner(Ledger(tmp_path / "runs.jsonl", Key), lambda key: {}, seconds=0.0)
    with pytest.raises(MissingRunError):
        runner.finish(KEY)


def test_a_claim_excludes_others_until_it_ends(tmp_path):
    def claim_batch(batch=8192):
        return claim(tmp_path / "share", ("search", "Muon", batch))

    with claim_batch() as ours, claim_batch() as theirs, claim_batch(512) as other:
        assert (ours, theirs, other) == (True, False, True)
    with claim_batch() as again, claim(None, "x") as alone, claim(None, "x") as alone_too:
        assert (again, alone, alone_too) == (True, True, True)


def test_a_claim_ends_with_its_process(tmp_path):
    """Nobody waits for a process that died: another one takes its run over."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert holder.stdout.readline() == b"True\n"
    trained = []
    runner = Runner(
        Ledger(tmp_path / "runs.jsonl", Key),
        lambda key: trained.append(key) or {"accuracy": 1.0},
        share=tmp_path,
    )
    runner.run(KEY)
    assert not trained
    holder.kill()
    holder.communicate()
    assert runner.finish(KEY)["accuracy"] == 1.0


def test_a_ledger_has_runs_on_one_data_set(tmp_path):
    older = Ledger(tmp_path / "runs.jsonl", Key)
    older.add(KEY, {})  # does not say on which
    refuse_other_data(older, data="cifar10")
    ledger = Ledger(tmp_path / "runs.jsonl", Key, {"data": "cifar100"})
    ledger.add(replace(KEY, seed=1), {})
    refuse_other_data(ledger, data="cifar100")
    with pytest.raises(SystemExit, match="has runs on cifar100, not on cifar10: name another"):
        refuse_other_data(ledger, data="cifar10")


def test_other_tokens_are_refused(tmp_path):
    ledger = Ledger(tmp_path / "runs.jsonl", Key, {"data": "text:a", "tokens": "bpe:512"})
    ledger.add(KEY, {"loss": 1.0})
    refuse_other_data(ledger, data="text:a", tokens="bpe:512")
    with pytest.raises(SystemExit, match="has runs on bpe:512, not on bytes"):
        refuse_other_data(ledger, data="text:a", tokens="bytes")


def test_a_line_that_was_cut_short_does_not_stop_a_study(tmp_path, capsys):
    path = tmp_path / "runs.jsonl"
    Ledger(path, Key).add(KEY, {"loss": 1.0})
    with path.open("a") as file:
        file.write('{"key": {"name": "a"')
    ledger = Ledger(path, Key)
    ledger.add(replace(KEY, seed=1), {"loss": 2.0})
    assert set(Ledger(path, Key).runs) == {KEY, replace(KEY, seed=1)}
    assert "cut short" in capsys.readouterr().out
