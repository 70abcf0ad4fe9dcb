"""The description on a package index: README, with links that also work there.

hatchling runs this when it builds a distribution. An index knows nothing of the repository, so
links to its files need the repository's address. It comes from the environment variable REPO_URL,
as for the site. Without it, a link becomes plain text and a figure its alternative text.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# Of these, only those that lead to a file of the repository.
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")
ANCHOR = re.compile(r'<a href="(?!\w+:|#)([^"]+)">(.*?)</a>')
FIGURE = re.compile(r'<img src="(?!\w+:)([^"]+)"([^>]*? alt="([^"]*)"[^>]*)>')


class LongDescription(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = adapt_links(readme, os.environ.get("REPO_URL", ""), f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def adapt_links(readme: str, repository: str, tag: str) -> str:
    """README for a package index. `tag` is the version of the files that links lead to."""
    if repository:
        pages, files = f"{repository}/blob/{tag}", f"{repository}/raw/{tag}"
        readme = LINK.sub(rf"[\1]({pages}/\2)", readme)
        readme = ANCHOR.sub(rf'<a href="{pages}/\1">\2</a>', readme)
        return FIGURE.sub(rf'<img src="{files}/\1"\2>', readme)
    return FIGURE.sub(r"*\3*", ANCHOR.sub(r"\2", LINK.sub(r"\1", readme)))
