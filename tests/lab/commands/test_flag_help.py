"""The help of a command: every flag has a text and a place in a group, and fits the terminal."""

import dataclasses
import re
from pathlib import Path
from typing import Annotated

import pytest
from typing_extensions import Doc

from neumann.lab.commands.flag_help import (
    EXAMPLES,
    GROUPED,
    GROUPS,
    REST,
    list_groups,
    read_texts,
)
from neumann.lab.commands.main import main
from neumann.lab.commands.parser import COMMANDS, parse_flags
from neumann.lab.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Base:
    first: int = 3  # after it
    # above it,
    # in two lines
    second: float | None = None


@dataclasses.dataclass(frozen=True)
class Example(Base):
    third: tuple[str, ...] = ("a", "b")
    """below it, in
    two lines"""
    fourth: Annotated[str, Doc("in a Doc")] = "×"  # not this
    fifth: bool | None = None  # μ, with a # inside
    sixth: Path | None = None


def test_texts_are_read_from_the_source():
    assert read_texts(Example) == {
        "first": "after it",
        "second": "above it, in two lines",
        "third": "below it, in two lines",
        "fourth": "in a Doc",
        "fifth": "μ, with a # inside",
        "sixth": "",
    }


def test_usage_and_defaults():
    (flags,) = (group for title, group in list_groups("example", Example()).items() if title)
    assert [tuple(flag) for flag in flags] == [
        ("--first INT", "after it (default: 3)"),
        ("--second FLOAT", "above it, in two lines"),
        ("--third STR …", "below it, in two lines (default: a b)"),
        ("--fourth STR", "in a Doc (default: ×)"),
        ("--fifth, --no-fifth", "μ, with a # inside"),
        ("--sixth PATH", ""),
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_a_text_and_every_setting_a_flag(command):
    settings = COMMANDS[command].settings
    groups = list_groups(command, settings())
    flags = [flag for group in groups.values() for flag in group]
    assert all(flag.text for flag in flags), flags
    names = {field.name for field in dataclasses.fields(settings)} - {"allow_code"}
    assert len(flags) == len(names)
    if command in GROUPED:
        assert groups[REST] == []  # all are in a group
        assert [title for title in groups if title][:5] == [
            *("data", "model", "optimizer", "schedule", "run")
        ]


@pytest.mark.parametrize(("command", "argument"), [("study", "FILE"), ("report", "FOLDER")])
def test_arguments_have_a_text_too(command, argument, capsys):
    with pytest.raises(SystemExit):
        parse_flags(command, ["--help"])
    printed = capsys.readouterr().out
    assert f"usage: neumann {command} {argument} [FLAGS]" in printed
    assert re.search(rf"^arguments:\n  {argument} +\w", printed, re.MULTILINE)


def test_an_argument_is_no_flag():
    with pytest.raises(UsageError, match=r"^unknown flag '--fil'") as error:
        parse_flags("study", ["--fil", "x"])
    assert "--file" not in str(error.value)


def test_set_needs_a_value():
    with pytest.raises(UsageError, match="--set needs a value, such as --set epochs=1"):
        parse_flags("study", ["study.toml", "--set"])


@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_the_form_for_large_batches_comes_first(command, capsys):
    arms = COMMANDS[command].settings().arms
    assert arms[:2] == ("neumann-spectral", "neumann")
    with pytest.raises(SystemExit):
        parse_flags(command, ["--help"])
    printed = capsys.readouterr().out
    assert f"\nexample: neumann {command} --arms neumann-spectral " in printed
    assert re.sub(r"\s+", " ", printed).count(f"(default: {' '.join(arms)})") == 1


def test_no_setting_is_in_two_groups():
    names = [name for group in GROUPS.values() for name in group]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("command", "first"), [("train", "--opt "), ("compare", "--arms ")])
def test_important_flags_come_first(command, first, capsys):
    assert main([command, "--help"]) == 0
    printed = capsys.readouterr().out
    titles = [f"\n{title}:\n" for title in GROUPS]
    places = [printed.index(title) for title in titles]
    assert places == sorted(places)
    assert printed.partition("\noptimizer:\n")[2].startswith(f"  {first}")
    assert printed.index("--lr ") < printed.index("--clip-grad ")


def test_the_file_changes_the_defaults_shown(tmp_path, capsys):
    file = tmp_path / "c.toml"
    file.write_text("epochs = 77\n")
    assert main(["train", "--config", str(file), "-h"]) == 0
    assert "passes over the training set (default: 77)" in capsys.readouterr().out


@pytest.mark.parametrize("command", EXAMPLES)
def test_examples_can_be_run_as_they_are(command, capsys):
    config = parse_flags(command, EXAMPLES[command].split())
    config.check()
    assert config.data == "digits"  # it comes with scikit-learn
    assert main([command, "-h"]) == 0
    line = f"example: neumann {command} {EXAMPLES[command]}"
    assert f"\n{line}\n" in capsys.readouterr().out
    assert len(line) <= 80
