"""What a run depends on besides its config: the code's commit, package versions and hardware.

Nothing here raises: what cannot be found out is None. The machine's name is left out, because
records are meant to be published.

A git repository may name programs to run, and the working folder's may be someone else's. So we ask
only about the package's own repository, and only for what is committed: commands that look at
files, such as `git status`, would run its filters and its file system monitor. We compare the files
ourselves.
"""

import contextlib
import hashlib
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
from neumann.lab.optimizers.arm_recipes import RECIPES

# Packages that may take part in a run, among them those of optimizers, which their extras are
# named after. Those not installed are left out.
OPTIMIZERS = tuple(recipe.package for recipe in RECIPES.values() if recipe.package)
LIBRARIES = ("torch", "numpy", "scipy", "scikit-learn", "tokenizers", "torchvision")
PACKAGES = (*LIBRARIES, *dict.fromkeys(OPTIMIZERS))
COMPILERS = ("triton", "numba")
GIT_SECONDS = 10.0
# Programs that a repository's settings could name. The commands that we use call none of them; this
# is in case a later version of git does.
_GIT_FLAGS = ("--no-pager", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")
# Ask nothing, write nothing, and fetch nothing from a repository that lacks objects.
_GIT_VARIABLES = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",
}
# Set inside a hook of git, where they name another repository.
_GIT_ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY")


def describe_environment() -> dict[str, Any]:
    """Return versions, hardware and the commit of this package."""
    commit = _describe_commit(Path(neumann.__file__).parent)
    return {"git": commit, "versions": _list_versions(), "hardware": describe_hardware()}


def _describe_commit(code: Path) -> dict[str, Any] | None:
    """Return the commit of a folder of code, and whether it differs; None if it is not tracked.

    An installed package may lie inside a repository that does not know it.
    """
    commit = _run_git(code, "rev-parse", "--verify", "HEAD")
    listed = commit and _run_git(code, "ls-tree", "-r", "-z", "HEAD")
    # Each entry is "mode type hash\tpath".
    entries = [entry.partition("\t") for entry in (listed or "").split("\0") if entry]
    files = {path: about.split()[-1] for about, _, path in entries}
    if commit is None or "__init__.py" not in files:
        return None
    return {"commit": commit, "dirty": not all(_is_unchanged(code / f, files[f]) for f in files)}


def _is_unchanged(file: Path, committed: str) -> bool:
    """Whether a file has the content whose hash git committed."""
    try:
        content = os.fsencode(os.readlink(file)) if file.is_symlink() else file.read_bytes()
    except OSError:
        return False
    # git may have written the lines of a text file with the system's ends.
    return committed in (
        _hash_blob(d, committed) for d in (content, content.replace(b"\r\n", b"\n"))
    )


def _hash_blob(content: bytes, like: str) -> str:
    """Return the hash that git gives a file, of the same kind as another one."""
    kind = "sha256" if len(like) == 64 else "sha1"
    return hashlib.new(kind, b"blob %d\0" % len(content) + content).hexdigest()


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
        environment = {k: v for k, v in os.environ.items() if k not in _GIT_ELSEWHERE}
        output = subprocess.check_output(
            ["git", *_GIT_FLAGS, "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**environment, **_GIT_VARIABLES},
            timeout=GIT_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return os.fsdecode(output).strip()


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
