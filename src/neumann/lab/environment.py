"""What a run depends on besides its config: the code's commit, versions and hardware.

Nothing here fails: what cannot be found out is None. The name of the machine is left out, since
records are meant to be published.
"""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import neumann

# Everything that may take part in a training; those not installed are left out.
PACKAGES = ("torch", "numpy", "scipy", "scikit-learn", "torchvision", "timm", "schedulefree")
COMPILERS = ("triton", "numba")
GIT_SECONDS = 10.0


def environment(folder: Path | None = None) -> dict[str, Any]:
    """Commit, versions and hardware, ready for JSON.

    Args:
        folder: where to look for a git repository; by default that of this package's code, and
            where it was installed without one, the working folder.
    """
    if folder is None:
        code = Path(neumann.__file__).parent
        # A virtual environment may lie in somebody else's repository.
        folder = code if _git(code, "ls-files", "__init__.py") else Path.cwd()
    return {
        "git": git_state(folder),
        "versions": versions(),
        "hardware": hardware(),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit, and whether tracked files differ from it; None where there is no repository.

    Files that git does not track do not count: the records themselves are usually among them.
    """
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else changes != ""}


def versions() -> dict[str, str | None]:
    """Of Python, this package, what it trains with, CUDA and the operating system."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "neumann": neumann.__version__,
    }
    for package in (*PACKAGES, *COMPILERS):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    # The one that runs, where it differs from the one that was installed.
    found["torch"] = str(torch.__version__)
    found["cuda"] = torch.version.cuda
    found["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    return found


def hardware() -> dict[str, Any]:
    """Processor, memory and, where there is one, the GPU that torch uses by default."""
    return {
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "cpu_usable": _usable_cpus(),  # fewer in a container or under taskset
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": _memory(),
        "gpu": _gpu(),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_SECONDS,
            # Looking must not write: `git status` would refresh the index.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return platform.processor() or None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine() or None


def _usable_cpus() -> int | None:
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return None


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _gpu() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
    }
