"""Who is tested in the language contest. It is written down before the first test and then stays.

Otherwise a run that is added to the searches afterwards could put another setting into the test.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.language.language_arms import Setting

Length = tuple[int, int]  # tokens per step and steps


@dataclass(frozen=True)
class Finalists:
    """At one batch size and length, the best setting first."""

    peer: str  # the arm with the lowest validation loss that is not ours
    settings: Mapping[str, tuple[Setting, ...]]  # by arm: of ours, the peer and others tested


def write_finalists(
    path: Path, chosen: Mapping[Length, Finalists], about: Mapping[str, Any]
) -> None:
    """Write them, unless another process has: all of them choose from the same runs."""
    content = {
        "about": dict(about),
        "finalists": [
            {"tokens_per_step": batch, "steps": steps, **asdict(each)}
            for (batch, steps), each in chosen.items()
        ],
    }
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps(content, indent=1) + "\n")
    try:
        os.link(part, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        if not path.exists():
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_finalists(path: Path) -> dict[Length, Finalists]:
    """Those of every length; none before the test."""
    if not path.exists():
        return {}
    return {
        (each["tokens_per_step"], each["steps"]): Finalists(
            each["peer"],
            {
                arm: tuple(Setting(**setting) for setting in settings)
                for arm, settings in each["settings"].items()
            },
        )
        for each in json.loads(path.read_text())["finalists"]
    }
