"""The frame of a benchmark script: its flags, where its numbers come from, and its JSON output."""

import argparse
import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch


def create_parser(
    doc: str | None, device: str | None = None, *, output: bool = True
) -> argparse.ArgumentParser:
    """A parser with the flags that scripts share; the docstring becomes the help text.

    `device` is the default of --device. Without one, there is no such flag.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", help="the commit to record, where git is not available")
    if device is not None:
        parser.add_argument("--device", default=device)
    if output:
        parser.add_argument("--output", type=Path, help="write the numbers to this JSON file")
    return parser


def describe_environment(device: torch.device | str, commit: str | None = None) -> dict[str, Any]:
    """Command, commit, date, hardware and versions: what every published number needs beside it."""
    # Here, because an older version of the library, which a script may measure, has it elsewhere.
    from neumann.lab.training import environment

    about = environment.describe_environment()
    spec = sys.modules["__main__"].__spec__
    program = [sys.argv[0]] if spec is None else ["-m", spec.name]
    words = [*program, *sys.argv[1:]]
    on_gpu = torch.device(device).type == "cuda"
    return {
        "command": " ".join(["python", *(hide_folder(word) for word in words)]),
        "commit": commit or (about["git"] or {}).get("commit", ""),
        "date": datetime.date.today().isoformat(),
        "hardware": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": about["versions"],
    }


def hide_folder(word: str) -> str:
    """An absolute path without its folder, which only one machine has."""
    path = Path(word)
    return path.name if path.is_absolute() else word


def describe_origin(commit: str | None = None) -> dict[str, Any]:
    """The part of the environment that every line of a ledger records."""
    about = describe_environment("cuda" if torch.cuda.is_available() else "cpu", commit)
    return {key: about[key] for key in ("commit", "date", "hardware", "versions")}


def write_result(path: Path | None, content: dict[str, Any]) -> None:
    """Write a result as JSON, if the user asked for a file."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")


def write_measurements(
    arguments: argparse.Namespace, device: torch.device | str, **content: Any
) -> None:
    """Write the numbers of a script, and the environment in which they were measured."""
    environment = describe_environment(device, arguments.commit)
    write_result(arguments.output, {"environment": environment, **content})
