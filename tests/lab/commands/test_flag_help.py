"""The help of a command: every flag has a text and a place in a group, and fits the terminal."""

import dataclasses
import re
from pathlib import Path
from typing import Literal

import pytest

from neumann.lab.commands.flag_help import EXAMPLES, GROUPED, GROUPS, REST, group_flags
from neumann.lab.commands.flags import describe_flags, list_flags
from neumann.lab.commands.main import main
from neumann.lab.commands.parser import COMMANDS, parse_flags
from neumann.lab.commands.settings_source import Setting
from neumann.lab.errors import UsageError


@pytest.mark.parametrize(
    ("hint", "default", "usage", "shown"),
    [
        (int, 3, "--a-b INT", "text (default: 3)"),
        (float, 1e-3, "--a-b FLOAT", "text (default: 0.001)"),
        (float | None, None, "--a-b FLOAT", "text"),
        (tuple[str, ...], ("a", "b"), "--a-b STR …", "text (default: a b)"),
        (tuple[str, ...], (), "--a-b STR …", "text"),
        (str, "×", "--a-b STR", "text (default: ×)"),
        (bool | None, None, "--a-b, --no-a-b", "text"),
        (bool, False, "--a-b", "text"),
        (Path | None, None, "--a-b PATH", "text"),
        (Literal["x", "y"], "x", "--a-b {x,y}", "text (default: x)"),
        (Literal["x", "y"] | None, None, "--a-b {x,y}", "text"),
    ],
)
def test_usage_and_defaults(hint, default, usage, shown):
    (flag,) = describe_flags({"a_b": Setting("a_b", hint, default, "text")})
    assert (flag.usage, flag.text) == (usage, shown)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_a_text_and_every_setting_a_flag(command):
    flags = list_flags(command)
    assert all(flag.text for flag in flags), flags
    names = {field.name for field in dataclasses.fields(COMMANDS[command].settings)}
    assert {flag.setting for flag in flags if flag.setting} == names - {"allow_code"}
    groups = group_flags(command, flags)
    grouped = [flag for group in groups.values() for flag in group]
    assert len(grouped) == len([flag for flag in flags if not flag.is_argument])
    if command in GROUPED:
        assert groups[REST] == []  # all are in a group
        assert list(groups)[:5] == ["data", "model", "optimizer", "schedule", "run"]


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
