"""What scripts record of where their numbers come from."""

import re
from pathlib import Path

import pytest

from benchmarks.common.script import describe_environment

RESULTS = Path(__file__).parents[2] / "results"


def test_a_command_is_recorded_without_the_folders_of_a_machine(monkeypatch):
    words = ["/somewhere/time.py", "--output", "/somewhere/out/step.json", "--data-dir", "data"]
    monkeypatch.setattr("sys.argv", words)
    command = describe_environment("cpu")["command"]
    assert command.endswith("--output step.json --data-dir data")
    assert "somewhere" not in command


@pytest.mark.parametrize("suffix", ["json", "jsonl", "txt", "md"])
def test_results_name_no_folder_of_a_machine(suffix):
    files = sorted(RESULTS.rglob(f"*.{suffix}"))
    assert files
    for file in files:
        found = re.search(r"(?<![\w.])/(root|home|work|opt|tmp|Users)/\S*", file.read_text())
        assert found is None, f"{file.name}: {found}"
