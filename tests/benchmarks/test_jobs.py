"""Scripts that start themselves several times."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common.jobs import add_ledger_flags, parse_shared
from benchmarks.common.script import create_parser
from tests.support.processes import PROCESS_TIMEOUT, is_running

SCRIPT = """
import os, time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.jobs import add_ledger_flags, parse_shared
from benchmarks.common.ledger import Ledger, Runner
from benchmarks.common.script import create_parser

@dataclass(frozen=True)
class Key:
    seed: int

def train(key):
    if key.seed == arguments.fail:
        raise RuntimeError("out of memory")
    print(f"trained {key.seed}", flush=True)
    time.sleep(0.2)
    return {"process": os.getpid()}

parser = create_parser("")
add_ledger_flags(parser, Path("runs.jsonl"))
parser.add_argument("--fail", type=int)
arguments = parse_shared(parser, prepare=lambda arguments: print("prepared", flush=True))
ledger = Ledger(arguments.results, Key)
runner = Runner(ledger, train, seconds=arguments.seconds, share=arguments.share)
for seed in range(8):
    runner.run(Key(seed))
print("| a table |")
"""


def run(folder: Path, *flags: str, status: int = 0) -> tuple[list[str], list[int]]:
    """What the script prints, and the process that trained each run."""
    (folder / "script.py").write_text(SCRIPT)
    path = os.pathsep.join(map(str, (Path.cwd(), Path.cwd() / "src")))
    found = subprocess.run(
        [sys.executable, "script.py", *flags],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert found.returncode == status, found.stdout
    lines = (folder / "runs.jsonl").read_text().splitlines()
    return found.stdout.splitlines(), [json.loads(line)["process"] for line in lines]


@pytest.mark.slow
def test_processes_share_the_runs_and_there_is_one_table(tmp_path):
    printed, processes = run(tmp_path, "--jobs", "2")
    assert len(processes) == 8
    assert len(set(processes)) == 2
    first, *shown, last = printed
    assert first == "prepared"
    assert sorted(line[4:] for line in shown) == [f"trained {seed}" for seed in range(8)]
    assert {line[:4] for line in shown} == {"[1] ", "[2] "}
    assert last == "| a table |"


@pytest.mark.slow
def test_a_process_that_fails_says_why(tmp_path):
    printed, processes = run(tmp_path, "--jobs", "2", "--fail", "7", status=1)
    assert len(processes) == 7
    assert "RuntimeError: out of memory" in printed
    assert "of 2 processes failed, as shown above. The runs that had ended are kept." in printed[-1]


def test_processes_end_with_the_one_that_started_them(tmp_path):
    waits = [
        sys.executable,
        "-c",
        "import os, time; print(os.getpid(), flush=True); time.sleep(60)",
    ]
    (tmp_path / "script.py").write_text(
        f"from benchmarks.common.jobs import run_side_by_side\nrun_side_by_side([{waits}] * 2)\n"
    )
    path = os.pathsep.join(map(str, (Path.cwd(), Path.cwd() / "src")))
    with subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        children = [int(parent.stdout.readline().split()[-1]) for _ in range(2)]
        parent.terminate()
        parent.wait(PROCESS_TIMEOUT)
    for child in children:
        assert not is_running(child)


def test_jobs_must_be_a_count(tmp_path, capsys):
    parser = create_parser("")
    add_ledger_flags(parser, tmp_path)
    with pytest.raises(SystemExit):
        parse_shared(parser, ["--jobs", "0"])
    assert "--jobs must be at least 1, got 0" in capsys.readouterr().err
    assert parse_shared(parser, []).jobs == 1


def test_a_table_needs_results(tmp_path, capsys):
    parser = create_parser("")
    parser.add_argument("stage")
    add_ledger_flags(parser, tmp_path / "runs.jsonl")
    with pytest.raises(SystemExit):
        parse_shared(parser, ["table"])
    assert "runs.jsonl does not exist: start at the root" in capsys.readouterr().err
    assert parse_shared(parser, ["train"]).stage == "train"
    (tmp_path / "runs.jsonl").touch()
    assert parse_shared(parser, ["table"]).stage == "table"
