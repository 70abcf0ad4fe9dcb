"""What MkDocs does besides its settings in mkdocs.yml.

- Pages link to files of the repository, as GitHub reads them: `../results/rounding.json`. A file
  that lies outside docs/ becomes part of the site, and the link leads there. CHANGELOG.md and
  CONTRIBUTING.md become pages.
- Headings get the anchors that GitHub gives them.
- A ```math block, which GitHub also renders, becomes MathML. Browsers draw that without a script.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)")


def on_config(config: MkDocsConfig) -> None:
    options: dict[str, Any] = config.mdx_configs
    options["toc"]["slugify"] = slugify(case="lower")
    math = {"name": "math", "class": "math", "format": render_math}
    options.setdefault("pymdownx.superfences", {})["custom_fences"] = [math]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the files outside docs/ that pages link to."""
    for name, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    pages = [Path(str(file.abs_src_path)) for file in files.documentation_pages()]
    for source in pages:  # grows: what is added may be a page with links of its own
        for link in LINK.findall(source.read_text()):
            path = (source.parent / link).resolve()
            uri = find_uri(path)
            if path.is_file() and path.is_relative_to(ROOT) and uri not in files.src_uris:
                add = File.generated(
                    config, uri, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV
                )
                files.append(add)
                if add.is_documentation_page():
                    pages.append(path)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where the files are on the site."""
    folder = Path(str(page.file.abs_src_path)).parent

    def replace(link: re.Match[str]) -> str:
        path = (folder / link[1]).resolve()
        if not path.exists():
            return link[0]  # MkDocs says which page has it
        start = posixpath.dirname(page.file.src_uri) or "."
        return "](" + posixpath.relpath(find_uri(path), start)

    return LINK.sub(replace, markdown)


def find_uri(path: Path) -> str:
    """Where a file of the repository is on the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
    return PAGES.get(name, name)


def render_math(source: str, *arguments: Any, **options: Any) -> str:
    return f'<div class="math">{convert(source, display="block")}</div>'
