"""What a run depends on besides its config: the code's commit, package versions and hardware.

Nothing here raises: what cannot be found out is None. The machine's name is left out, because
records are meant to be published.
"""

import contextlib
import os
import platform
import re
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import neumann
from neumann.lab.arms import RECIPES

# Packages that may take part in a training, among them those of optimizers, which their extras are
# named after. Those not installed are left out.
OPTIMIZERS = tuple(recipe.extra for recipe in RECIPES.values() if recipe.extra)
PACKAGES = ("torch", "numpy", "scipy", "scikit-learn", "torchvision", *dict.fromkeys(OPTIMIZERS))
COMPILERS = ("triton", "numba")
GIT_SECONDS = 10.0


def describe_environment(folder: Path | None = None) -> dict[str, Any]:
    """Return versions, hardware and the commit of this package, or else of the working folder."""
    if folder is None:
        code = Path(neumann.__file__).parent
        # A virtual environment may lie inside an unrelated repository.
        folder = code if _run_git(code, "ls-files", "__init__.py") else Path.cwd()
    hardware = describe_hardware()
    return {"git": _read_git_state(folder), "versions": _list_versions(), "hardware": hardware}


def _read_git_state(folder: Path) -> dict[str, Any] | None:
    commit = _run_git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    # Untracked files do not count: the records themselves are usually among them.
    changes = _run_git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else changes != ""}


def _list_versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    found["neumann"] = neumann.__version__
    for package in (*PACKAGES, *COMPILERS):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    # The one that is imported, in case it differs from the one that was installed.
    found["torch"] = str(torch.__version__)
    found["cuda"] = torch.version.cuda
    found["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    return found


def describe_hardware() -> dict[str, Any]:
    """Return processor, memory and, if there is one, the GPU that torch uses by default."""
    memory = _ask(lambda: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return {
        "cpu": _read_cpu_model(),
        "cpu_count": os.cpu_count(),
        # Fewer in a container or under taskset.
        "cpu_usable": _ask(lambda: len(os.sched_getaffinity(0))),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": memory,
        "gpu": _describe_gpu(),
    }


def _run_git(folder: Path, *arguments: str) -> str | None:
    try:
        # Reading must not write: `git status` would refresh the index.
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        command = ["git", "-C", str(folder), *arguments]
        output = subprocess.check_output(
            command, stderr=subprocess.DEVNULL, env=environment, timeout=GIT_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return output.decode(errors="replace").strip()


def _read_cpu_model() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return platform.processor() or None
    found = re.search(r"^model name\s*:(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine() or None


def _ask(question: Callable[[], int]) -> int | None:
    """Return what the system answers, or None where it has no answer."""
    try:
        return question()
    except (AttributeError, OSError, ValueError):
        return None


def _describe_gpu() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
    }
