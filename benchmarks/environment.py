"""What a published number has beside it: command, commit, date, hardware and versions."""

import datetime
import platform
import subprocess
import sys
from typing import Any

import torch


def environment(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """For the top of a result; `commit` where git cannot tell."""
    commit = (
        commit
        or subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "numba", "schedulefree"):
        try:
            versions[name] = __import__(name).__version__
        except (ImportError, AttributeError):
            continue
    hardware = platform.machine()
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name()
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "hardware": hardware,
        "threads": torch.get_num_threads(),
        "versions": versions,
    }


def origin(commit: str | None = None) -> dict[str, Any]:
    """For each of many runs in one file: where it comes from, without the command."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = environment(device, commit)
    return {key: about[key] for key in ("commit", "date", "hardware", "versions")}
