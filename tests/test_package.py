"""The package: its public names, what it may import, and the one version."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

import neumann
from neumann.lab.optimizers.arm_recipes import RECIPES
from tests.check_installs import ALONE, USES

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "neumann"


def test_public_names():
    assert set(neumann.__all__) == {
        "IdealizedNeumann",
        "Neumann",
        "__version__",
        "guard",
        "large_batch",
        "param_groups",
        "recalibrate_batchnorm",
    }
    assert all(hasattr(neumann, name) for name in neumann.__all__)
    assert {*neumann.__all__, "optim", "spectrum"} <= set(dir(neumann))
    assert neumann.spectrum.__name__ == "neumann.spectrum"
    with pytest.raises(AttributeError, match="no attribute 'Newmann'"):
        neumann.Newmann  # noqa: B018


# Each part prints what has been imported so far.
IMPORTS = """
import sys
import neumann
assert "torch" not in sys.modules
neumann.Neumann
print(*sys.modules)
import neumann.optim.backends.cpu
print(*sys.modules)
import torch
p = torch.nn.Parameter(torch.ones(3))
optimizer = neumann.Neumann([p], 0.1, warmup_steps=1, reset_steps=0, foreach=True)
p.grad = torch.ones(3)
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
optimizer.step()
p = torch.nn.Parameter(torch.ones(3, 4))
optimizer = neumann.Neumann([p], 0.1, precondition="spectral", foreach=True)
p.grad = torch.ones(3, 4)
optimizer.step()
print(*sys.modules)
import neumann.lab.data, neumann.lab.models
print(*sys.modules)
"""


@pytest.mark.slow
def test_optional_packages_and_kernels_are_imported_late():
    """Only where they are needed: not by a step without kernels, nor by loading a state dict."""
    output = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORTS], check=True, capture_output=True, text=True
    )
    package, cpu, stepped, lab = (set(line.split()) for line in output.stdout.splitlines())
    assert "torch" in package
    optional = {"numba", "triton", "sklearn", "rich", "matplotlib", "timm"}
    assert package.isdisjoint(optional | {"accelerate", "lightning", "transformers"})
    assert "numba" not in cpu
    kernels = {"numba", "numba_kernel", "address_table", "update_kernel", "scalars_kernel"}
    kernels.add("symmetric_kernel")
    assert kernels.isdisjoint(name.rpartition(".")[2] for name in stepped)
    assert lab.isdisjoint({"torchvision", "timm", "sklearn", "PIL"})


# Each room of the package, with the rooms that it may import from.
MAY_IMPORT = {
    "optim": {"optim"},
    "theory": {"theory", "optim"},
    "spectrum": {"spectrum"},
    "integrations": {"integrations", "optim"},
    "lab": {"lab", "optim", "spectrum", "theory"},
}
MOVED = {"optim/series.py", "optim/spectral.py"}  # old names of modules that moved


def test_arrows_run_downwards():
    """No room imports from one above it."""
    for room, allowed in MAY_IMPORT.items():
        for path in (SOURCE / room).glob("**/*.py"):
            if str(path.relative_to(SOURCE)) in MOVED:
                continue
            for name in imported(path):
                parts = name.split(".")
                if parts[0] == "neumann" and len(parts) > 1 and (SOURCE / parts[1]).is_dir():
                    assert parts[1] in allowed, f"{path} imports {name}"


def test_every_file_name_is_unique():
    """A file name says what a module is about, without the folder it is in."""
    seen: dict[str, Path] = {}
    for folder in (SOURCE, ROOT / "benchmarks"):
        for path in sorted(folder.glob("**/*.py")):
            moved = folder == SOURCE and str(path.relative_to(SOURCE)) in MOVED
            if not path.name.startswith("__") and not moved:
                assert path.name not in seen, f"{path} and {seen[path.name]}"
                seen[path.name] = path


def test_every_package_lists_its_modules():
    """The docstring of a package is the map of it: it names every module and package inside."""
    for folder in (SOURCE, ROOT / "benchmarks"):
        for init in folder.glob("**/__init__.py"):
            names = {path.stem for path in init.parent.glob("*.py")} - {"__init__", "__main__"}
            docstring = ast.get_docstring(ast.parse(init.read_text())) or ""
            missing = [name for name in sorted(names) if not re.search(rf"\b{name}\b", docstring)]
            assert not missing, f"{init} does not name {missing}"


def test_every_published_result_has_a_script():
    index = (ROOT / "results/README.md").read_text()
    folder = ROOT / "results"
    for path in set(folder.glob("**/*.*")) - {folder / "README.md"}:
        name = path.relative_to(folder).with_suffix("").as_posix()
        pattern = f"`{path.parent.relative_to(folder).as_posix()}/*{path.suffix}`"
        listed = name.removesuffix("-cpu") in index or pattern in index
        assert listed, f"the index lacks {path.name}"
    for name in re.findall(r"`(\w[\w/-]*\.(?:jsonl?|txt|png|md))`", index):
        assert (folder / name).exists(), f"the index names {name}, which is not there"
    for module in re.findall(r"`((?:benchmarks|tests)\.[a-z_.]+)", index):
        assert importlib.util.find_spec(module), f"results/README.md names {module}"


def test_old_imports_still_work():
    """What README and docs of version 0.1 showed, where a module has moved since."""
    from neumann.optim.phases import Phase, row
    from neumann.optim.preconditioners import Diagonal, Momentum, Preconditioner
    from neumann.optim.schedules import InverseTime, LinearScaling, StepDecay
    from neumann.optim.series import solve
    from neumann.optim.spectral import Spectral
    from neumann.optim.update import Tensors, update_single
    from neumann.theory import series

    assert solve is series.solve
    assert Spectral().before == Momentum()
    assert isinstance(Diagonal(), Preconditioner)
    w = torch.ones(3)
    tensors = Tensors([w], [torch.full((3,), 0.5)], [torch.zeros(3)], [torch.zeros(3)])
    update_single(tensors, row(Phase.WARMUP, 0.1, 0.0, 0.99, 0.0))
    assert torch.allclose(w, torch.full((3,), 0.95))
    assert all(issubclass(c, LRScheduler) for c in (InverseTime, LinearScaling, StepDecay))


# The rooms of the lab, from the bottom up.
FLOORS = ("storage", "data", "models", "optimizers", "training", "studies", "report", "commands")


def test_the_floors_of_the_lab():
    """Storage at the bottom, commands at the top; a report never imports what trains."""
    for number, floor in enumerate(FLOORS):
        above = set(FLOORS[number + 1 :])
        for path in (SOURCE / "lab" / floor).glob("**/*.py"):
            for name in imported(path):
                parts = name.split(".")
                if parts[:2] == ["neumann", "lab"] and len(parts) > 2:
                    assert parts[2] not in above, f"{path} imports {name}"
                    trains = parts[2:4] in (["training", "learner"], ["training", "loop"])
                    assert not (trains and floor == "report"), f"{path} imports {name}"


UNIX_ONLY = ("fcntl", "grp", "resource", "termios")
IMPORT_ALL = f"""
import importlib, pkgutil, sys
for name in {UNIX_ONLY}:
    sys.modules[name] = None
import neumann
for module in pkgutil.walk_packages(neumann.__path__, "neumann."):
    if module.name != "neumann.__main__" and ".integrations." not in module.name:
        importlib.import_module(module.name)
"""


@pytest.mark.slow
def test_every_module_imports_without_unix_only_modules():
    """As on Windows. `pwd` cannot be blocked, because torch needs it on Linux.

    The packages that integrations are for take seconds to import, so those are only read.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", IMPORT_ALL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not [path for path in SOURCE.glob("**/*.py") if "pwd" in imported(path)]
    for path in (SOURCE / "integrations").glob("*.py"):
        assert set(UNIX_ONLY).isdisjoint(name.split(".")[0] for name in imported(path))


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


def test_the_package_is_typed():
    assert (SOURCE / "py.typed").exists()


def test_no_message_points_to_an_index():
    """The package is on none yet."""
    for path in [*(ROOT / "src").glob("**/*.py"), *(ROOT / "docs").glob("**/*.md")]:
        assert "install neumann-optimizer" not in path.read_text(), path


def test_every_extra_exists_and_is_installed_before_a_release():
    """Names have no underscores, which the pip that Python 3.11 brings would not find."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = set(content["project"]["optional-dependencies"]) - {"dev"}
    assert extras == set(USES) - {ALONE}
    assert extras >= {recipe.extra for recipe in RECIPES.values() if recipe.extra}
    assert not [extra for extra in extras if "_" in extra]
