"""The tables of docs/cost.md come from the files in results."""

import json

import pytest

from benchmarks.common.ledger import Ledger
from benchmarks.common.pages import fill_parts, list_parts
from benchmarks.language import state_precision
from benchmarks.language.language_runs import RunKey
from benchmarks.step import update_cost_page
from benchmarks.step.shapes import CASES
from benchmarks.step.step_tables import (
    ADAMW,
    COMPARED,
    OURS,
    SQUARES,
    format_peers,
    format_steps,
    format_symmetric,
)
from benchmarks.step.update_cost_page import KIND, MISSING, PAGE, PARTS, make_part


def test_the_page_is_up_to_date():
    """If this fails, run python -m benchmarks.step.update_cost_page."""
    page = PAGE.read_text()
    assert sorted(list_parts(page, KIND)) == sorted(PARTS)
    assert fill_parts(page, KIND, {name: make_part(name) for name in PARTS}) == page


def test_readme_agrees_with_the_results():
    """Its sentence about the cost of a step is written by hand: a new measurement changes it."""
    root = PAGE.parents[1]
    readme = " ".join((root / "README.md").read_text().split())
    rows = json.loads((root / "results/step-h200.json").read_text())["rows"]
    times = {row["name"]: row["gpu_ms"] for row in rows if CASES[row["case"]].title == "GPT-2 124M"}
    share = f"{times[OURS] / times[ADAMW]:.2f} ×"
    assert f"takes {share} the GPU time of torch's fused AdamW (GPT-2 124M)" in readme
    cases = json.loads((root / "results/preconditioning-h200.json").read_text())["cases"]
    ratios = (cases[name]["ratios"][COMPARED["spectral"]] for name in ("ResNet-9", "ResNet-50"))
    small, large = (f"{100 * (ratio - 1):.0f} %" for ratio in ratios)
    assert f"adds {small} to a training step of ResNet-9 at batch 8192" in readme
    assert f"{large} to one of ResNet-50 at batch 256" in readme


def test_the_pages_agree_with_the_results_on_training_steps():
    """Sentences by hand again: the start of the page, and the note on the paper's claim."""
    root = PAGE.parents[1]
    cases = json.loads((root / "results/preconditioning-h200.json").read_text())["cases"]
    ratios = {name: case["ratios"] for name, case in cases.items()}
    small, large = (ratios[name][COMPARED["spectral"]] - 1 for name in ("ResNet-9", "ResNet-50"))
    start = " ".join(PAGE.read_text().split())
    assert f"adds {100 * small:.0f} % to a training step of ResNet-9" in start
    assert f"{100 * large:.0f} % to one of ResNet-50" in start
    rows = json.loads((root / "results/preconditioner-share-h200.json").read_text())["rows"]
    (share,) = (r["gpu_share_quartiles"][1] for r in rows if r["part"] == "step, spectral P")
    assert f"{100 * share:.1f} % of GPU time to one of GPT-2 124M" in start
    adamw = ratios["ResNet-50"][COMPARED["fused AdamW"]]
    assert f"AdamW's takes {adamw:.2f} × as long as ours" in (PAGE.parent / "paper.md").read_text()


def test_the_page_has_the_losses_with_less_precise_state(capsys):
    path = PAGE.parents[1] / state_precision.RESULTS
    state_precision.print_table(Ledger(path, RunKey))
    table = capsys.readouterr().out
    assert len(table.splitlines()) == 2 + len(state_precision.STATES)
    assert table in PAGE.read_text()


@pytest.mark.parametrize("name", PARTS)
def test_what_has_no_file_is_not_measured_yet(name, tmp_path):
    assert make_part(name, tmp_path) == MISSING


def test_a_table_says_where_it_is_from(tmp_path):
    row = {"case": "e", "name": "AdamW fused", "wall_ms": 2.0, "gpu_ms": None}
    names = ("Neumann fused", "Neumann fused, no forces", "Neumann foreach")
    rows = [row, *({**row, "name": name, "wall_ms": 3.0} for name in names)]
    about = {"hardware": "a CPU", "commit": "0123456789", "date": "2026-01-02"}
    about["versions"] = {"torch": "2.10.0"}
    (tmp_path / "step-cpu.json").write_text(json.dumps({"environment": about, "rows": rows}))
    table, source = make_part("step-cpu", tmp_path).split("\n\n")
    assert table.splitlines()[-1] == "| a small MLP, 4 tensors | 2.0 | 1.50 × | 1.50 × | 1.50 × |"
    assert source == (
        "*a CPU, torch 2.10.0, commit 0123456, 2026-01-02 ([JSON](../results/step-cpu.json)).*"
    )


def test_speedups_have_quartiles_where_the_file_has_them():
    def row(size, kind):
        return {"size": size, "kind": kind, "variant": "symmetric", "speedup": 1.5}

    rows = [row(size, kind) for size in SQUARES for kind in ("gram", "polynomial")]
    assert format_symmetric(rows).splitlines()[-1] == "| 4 × 4,096² | 1.50 × | 1.50 × |"
    for each in rows:
        each["speedup_quartiles"] = [1.4, 1.5, 1.6]
    spread = "1.50 × [1.40, 1.60]"
    assert format_symmetric(rows).splitlines()[-1] == f"| 4 × 4,096² | {spread} | {spread} |"


def test_a_graph_has_its_own_column():
    row = {
        "case": "tiny",
        "weights": 10,
        "name": "torch Muon, captured",
        "wall_quartiles_ms": [1.0, 2.0, 3.0],
        "gpu_quartiles_ms": None,
        "state_bytes": 40,
        "graph_bytes": 3e9,
        "peak_bytes": 0,
    }
    assert format_peers([row]).splitlines()[-1] == (
        "| a tiny network | torch Muon, captured | 2.00 [1.00, 3.00] |  |  |  | 4.00 | 3.00 "
        "| 0.00 |"
    )


def test_bandwidth_is_that_of_the_copy():
    names = ("Neumann fused", "Neumann fused, bf16 state", "Neumann fused, no forces")
    row = {"case": "a", "name": "AdamW fused", "wall_ms": 4.0, "gpu_ms": 2.0, "bytes_moved": 28}
    rows = [row, *({**row, "name": name, "gpu_ms": 1.0} for name in names)]
    rows.append({**row, "name": "plain copy", "bytes_moved": 8, "gpu_ms": 0.25})
    share = "0.50 × (1.00)"
    assert format_steps(rows, on_gpu=True).splitlines()[-1] == (
        f"| ResNet-50, 161 tensors | 2.000 (4.00) | {share} | {share} | {share} | 88 % |"
    )


def test_the_command_fills_the_page(tmp_path, monkeypatch):
    page = tmp_path / "cost.md"
    page.write_text(f"a\n<!-- {KIND} step-cpu -->\nold\n<!-- end of {KIND} -->\nz\n")
    monkeypatch.setattr(update_cost_page, "PAGE", page)
    update_cost_page.main()
    filled = page.read_text()
    assert "old" not in filled
    assert "AdamW fused" in filled
