"""Names for folders."""

import itertools
import os
from pathlib import Path

NAME_BYTES = 255  # of a file or folder, at most


def plain_name(text: str) -> str:
    """A name for a folder."""
    return "".join(c if c.isalnum() or c in "-_.=," else "_" for c in text)


def fresh_folder(text: str) -> Path:
    """A folder under runs/ that does not exist yet, named after what is trained."""
    # From the end, where the names of a path differ; a number follows.
    name = os.fsencode(plain_name(text))[-NAME_BYTES + 20 :].decode(errors="ignore")
    for number in itertools.count(1):
        folder = Path("runs") / f"{name}-{number}"
        if not folder.exists():
            return folder
    raise AssertionError("unreachable")
