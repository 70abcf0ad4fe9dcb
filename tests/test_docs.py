"""README, CONTRIBUTING and docs: their code runs, and what they refer to exists."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#]*)(?:#([^)]+))?\)")
IMAGE = re.compile(r'<img src="(?!https?:)([^"]+)"')
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
PATH = re.compile(r"(?<![\w/.-])(?:src|tests|docs|results|benchmarks|examples|\.github)/[\w./*-]+")
TEST_FILE = re.compile(r"(?<![\w/])test_\w+\.py")
MODULE = re.compile(r"(?<![\w./-])(?:neumann|benchmarks)(?:\.\w+)+")
CODE = re.compile(r"^```.*?^```|`[^`]+`", re.MULTILINE | re.DOTALL)
CARET = re.compile(r"\^-?[{⅓½¼]")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGET = re.compile(r"^make ([\w-]+)|`make ([\w-]+)`", re.MULTILINE)

each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)


def test_there_are_blocks_to_run():
    assert sum(len(BLOCK.findall(page.read_text())) for page in PAGES) >= 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.* is deprecated")  # by Lightning
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@each_page
def test_code_blocks_run(page, tmp_path, monkeypatch):
    """The Python blocks of a page run top to bottom, in one namespace."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    text = page.read_text()
    for match in BLOCK.finditer(text):
        line = text[: match.start(1)].count("\n")
        source = "\n" * line + match.group(1)  # a traceback then names the line of the page
        exec(compile(source, str(page), "exec"), namespace)


@each_page
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = [slug(heading) for heading in HEADING.findall(path.read_text())]
            assert anchor in headings, f"{page.name} links to {target}#{anchor}"
    for image in IMAGE.findall(page.read_text()):
        assert (page.parent / image).is_file(), f"{page.name} shows {image}"


@each_page
def test_file_paths_exist(page):
    text = page.read_text()
    for name in PATH.findall(text):
        assert list(ROOT.glob(name.rstrip("./"))), f"{page.name} names {name}"
    for name in TEST_FILE.findall(text):
        assert list((ROOT / "tests").glob(f"**/{name}")), f"{page.name} names {name}"


@pytest.mark.slow
@each_page
def test_dotted_names_exist(page):
    # A line with ::: shows a docstring. The site does not build if its name is wrong.
    text = re.sub(r"^::: .*", "", page.read_text(), flags=re.MULTILINE)
    for name in set(MODULE.findall(text)):
        assert resolves(name), f"{page.name} names {name}"


@each_page
def test_the_cpu_builds_of_torch_and_torchvision_come_together(page):
    """A torchvision that does not match torch cannot be imported, and the extra `lab` needs it."""
    for line in page.read_text().splitlines():
        if "download.pytorch.org/whl/cpu" in line:
            assert "torch torchvision" in line, f"{page.name}: {line}"


@each_page
def test_make_targets_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    for found in TARGET.findall(page.read_text()):
        target = "".join(found)
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name} says make {target}"


@each_page
def test_roots_are_not_written_with_a_caret(page):
    """A reader would see the caret: write √ or ∛, or a block of math."""
    assert CARET.findall(CODE.sub("", page.read_text())) == []


def test_getting_started_names_every_extra():
    page = (ROOT / "docs/getting-started.md").read_text()
    block = page[page.index("```sh") :].split("```")[1]
    for extra in PROJECT["project"]["optional-dependencies"].keys() - {"dev"}:
        assert re.search(rf"(?<![\w-]){extra}(?![\w-])", block), extra


@each_page
def test_the_source_distribution_has_what_a_page_links_to(page):
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    for target, _ in LINK.findall(page.read_text()):
        if target:
            name = (page.parent / target).resolve().relative_to(ROOT).parts[0]
            assert name in {*included, "pyproject.toml"}, f"{page.name} links to {target}"


def test_the_source_distribution_can_run_make():
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    makefile = (ROOT / "Makefile").read_text()
    assert {"Makefile", *re.findall(r"constraints[\w-]*\.txt", makefile)} <= {*included}


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    module, *attributes = name.split(".")
    found = importlib.import_module(module)
    for number, attribute in enumerate(attributes, start=2):
        if not hasattr(found, attribute):
            try:
                importlib.import_module(".".join(name.split(".")[:number]))
            except ModuleNotFoundError:
                return False
        found = getattr(found, attribute)
    return True
