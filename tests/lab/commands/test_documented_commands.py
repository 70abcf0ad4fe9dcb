"""The commands in README and docs can be parsed, and the first one of a page needs no data."""

import re
import shlex
from pathlib import Path

import pytest

from neumann.lab.commands.parser import COMMANDS, parse_flags
from neumann.lab.studies.study_toml import read_study_toml

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FIRST_PAGES = ["docs/getting-started.md", "docs/lab.md", "docs/studies.md", "docs/tuning.md"]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)


def list_commands(page):
    """The words after `neumann` of every command in the shell blocks of a page."""
    found = []
    for block in BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["torchrun"] and "neumann" in words:
                words = words[words.index("neumann") :]
            if len(words) > 1 and words[0] == "neumann" and words[1] in COMMANDS:
                found.append(words[1:])
    return found


def test_there_are_commands():
    assert sum(len(list_commands(page)) for page in PAGES) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_documented_commands_can_be_parsed(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for command, *words in list_commands(page):
        config = parse_flags(command, words)
        if command in ("train", "compare", "sweep"):
            config.check()
        if command == "study" and config.file != Path("FILE.toml"):
            read_study_toml(config.file, Path("runs/x"), config.set)


@pytest.mark.parametrize("page", FIRST_PAGES)
def test_the_first_command_needs_no_data(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    command, *words = list_commands(ROOT / page)[0]
    config = parse_flags(command, words)
    if command == "study":
        config = read_study_toml(config.file, Path("runs/x")).points[0].config
    assert config.data == "digits"
