"""The commands that measure steps run on a CPU in small, write their numbers and end with a table.

They are those of docs/cost.md, so that one sitting with a GPU does not end with a usage error.
"""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SMALL = {
    "compare_muons": "--cases tiny --seconds 0 --only Neumann torch",
    "preconditioner_share": "--model gpt:width=32,depth=1,heads=1 --tokens 64 --rows 2 --context 8 "
    "--vocabulary 50 --measured 2 --seconds 0",
    "preconditioner_cost": "--cases ResNet-9 --batch 2 --steps 1 --rounds 2 --no-compile",
    "time_symmetric_product": "--sizes 1x20x8",
    "time_optimizers": "--cases e --seconds 0 --only fused",
}
PAGE = Path(__file__).parents[2] / "docs" / "cost.md"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", SMALL)
def test_a_small_run_writes_its_numbers_and_ends_with_a_table(
    name, device, tmp_path, monkeypatch, capsys
):
    if name == "time_symmetric_product":
        pytest.importorskip("triton")
        import tests.support.triton_runs  # noqa: F401  # lets the interpreter run loops

    module = importlib.import_module(f"benchmarks.step.{name}")
    path = tmp_path / "numbers.json"
    given = ["--device", device, "--commit", "abc", "--output", str(path), *SMALL[name].split()]
    monkeypatch.setattr(sys, "argv", [name, *given])
    module.main()
    found = json.loads(path.read_text())
    assert found["environment"]["commit"] == "abc"
    assert found.get("rows") or found["cases"]
    assert not [row for row in found.get("rows", ()) if isinstance(row.get("error"), str)]
    assert not [case["left_out"] for case in found.get("cases", {}).values() if case["left_out"]]
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("| ")


def test_the_page_lists_these_commands():
    commands = re.findall(
        r"^python -m benchmarks\.step\.(\w+) --device cuda", PAGE.read_text(), re.M
    )
    assert sorted(commands) == sorted(SMALL)
