"""The description on a package index: links of README that work outside of the repository."""

import re
from pathlib import Path

import pytest

pytest.importorskip("hatchling")  # part of the extra `dev`

from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

from docs.long_description import ANCHOR, FIGURE, LINK, adapt_links

ROOT = Path(__file__).parent.parent
ADDRESS = "https://example.org/owner/neumann"
README = """![badge](https://img.example/x)
[how it
works](docs/how.md#part) and [a paper](https://arxiv.org/abs/1), [above](#top)
<img src="results/a.png" width="9" alt="Three lines."> <a href="CITATION.cff">cite</a>"""


def test_links_lead_to_the_files_of_the_release():
    assert adapt_links(README, ADDRESS, "v1.2") == (
        f"""![badge](https://img.example/x)
[how it
works]({ADDRESS}/blob/v1.2/docs/how.md#part) and [a paper](https://arxiv.org/abs/1), [above](#top)
<img src="{ADDRESS}/raw/v1.2/results/a.png" width="9" alt="Three lines."> """
        f"""<a href="{ADDRESS}/blob/v1.2/CITATION.cff">cite</a>"""
    )


def test_without_an_address_text_remains():
    assert adapt_links(README, "", "v1.2") == (
        """![badge](https://img.example/x)
how it
works and [a paper](https://arxiv.org/abs/1), [above](#top)
*Three lines.* cite"""
    )


@pytest.mark.parametrize("address", ["", ADDRESS])
def test_the_built_description_has_no_relative_link(address, monkeypatch):
    monkeypatch.setenv("REPO_URL", address)
    metadata = ProjectMetadata(str(ROOT), PluginManager()).core
    text = metadata.readme
    assert metadata.readme_content_type == "text/markdown"
    assert not any(pattern.search(text) for pattern in (LINK, ANCHOR, FIGURE))
    assert (f"{ADDRESS}/raw/v{metadata.version}/results/large-batch.png" in text) == bool(address)
    linked = re.findall(rf"{ADDRESS}/(?:blob|raw)/v{metadata.version}/([^)\"#]+)", text)
    assert len(linked) > 10 if address else not linked
    assert all((ROOT / name).exists() for name in linked)
