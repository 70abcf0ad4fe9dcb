"""The package: its public names, what it may import, and the one version."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import neumann

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "neumann"


def test_public_names():
    assert set(neumann.__all__) == {
        "IdealizedNeumann",
        "Neumann",
        "__version__",
        "guard",
        "recalibrate_batchnorm",
    }
    assert all(hasattr(neumann, name) for name in neumann.__all__)


def test_importing_needs_torch_alone():
    """The optional dependencies are imported only by what is about them."""
    script = "import sys, neumann; print(' '.join(sorted(sys.modules)))"
    output = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], check=True, capture_output=True, text=True
    )
    loaded = set(output.stdout.split())
    assert "torch" in loaded
    optional = {"numba", "triton", "sklearn", "rich", "matplotlib", "timm"}
    assert loaded.isdisjoint(optional | {"accelerate", "lightning", "transformers"})


def test_arrows_run_downwards():
    """Nobody imports what stands above; optim and spectrum not each other either."""
    above = ("integrations", "lab", "report", "cli")
    below = {
        "optim": ("spectrum", *above),
        "spectrum": ("optim", *above),
        "lab": ("integrations", "report", "cli"),
        "integrations": ("spectrum", "lab", "report", "cli"),
        "report": ("integrations", "spectrum", "cli"),
    }
    for package, forbidden in below.items():
        for path in (SOURCE / package).glob("**/*.py"):
            for name in imported(path):
                parts = name.split(".")
                upwards = parts[0] == "neumann" and len(parts) > 1 and parts[1] in forbidden
                assert not upwards, f"{path.name} imports {name}"


def test_a_report_reads_records_and_trains_nothing():
    trains = {f"neumann.lab.{name}" for name in ("training", "compare", "sweep", "data", "models")}
    for path in (SOURCE / "report").glob("**/*.py"):
        for name in imported(path):
            assert ".".join(name.split(".")[:3]) not in trains, f"{path.name} imports {name}"


def imported(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_the_version_is_one():
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.+)$", citation, re.MULTILINE)[1] == neumann.__version__
    assert f"## {neumann.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_name_of_the_design_is_typed():
    assert (SOURCE / "py.typed").exists()
