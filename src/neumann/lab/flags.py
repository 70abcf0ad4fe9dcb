"""The settings of a command: its defaults, those of a --config file, and flags, in this order.

tyro reads the flags and prints the help; its errors, which are boxes of several lines, are retold
in one. A file is TOML, with the names of the flags, or the JSON that a run, a comparison or a sweep
has kept. UsageError for whatever cannot be used.
"""

import contextlib
import dataclasses
import io
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any, TypeVar, cast

import tyro

from neumann.lab.config_files import from_file, from_mapping
from neumann.lab.errors import UsageError, unknown
from neumann.lab.reading import read_object

_Config = TypeVar("_Config")

CONFIG_HELP = "--config FILE: defaults from a TOML file of flags, or a JSON file a run kept."


def parsed(kind: type[_Config], words: list[str], command: str) -> _Config:
    """The command's settings: its defaults, those of a --config file, and flags, in this order."""
    words, file = _without_config(words)
    defaults = kind()
    if file is not None:
        given = _as_words(_read(file, kind), defaults)
        try:
            defaults = _parse(given, command, defaults)
        except UsageError as error:
            raise UsageError(f"--config {file}: {error}") from error
    return _parse(words, command, defaults)


def _parse(words: list[str], command: str, defaults: _Config) -> _Config:
    complaint, printed = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(printed):
            config, rest = tyro.cli(
                type(defaults),
                args=words,
                prog=f"neumann {command}",
                description=f"{' '.join((type(defaults).__doc__ or '').split())}\n\n{CONFIG_HELP}",
                default=defaults,
                return_unknown_args=True,
                config=(tyro.conf.DisallowNone,),
            )
    except SystemExit as left:
        if not left.code:
            print(_readable(printed.getvalue()), end="")
            raise
        raise _retold(complaint.getvalue(), command) from None
    if not rest:
        return config
    if not rest[0].startswith("-"):
        raise UsageError(f"neumann {command} does not know what to do with {rest[0]!r}")
    fields = dataclasses.fields(cast(Any, defaults))
    flags = ["--config", *("--" + field.name.replace("_", "-") for field in fields)]
    raise unknown("flag", rest[0].partition("=")[0], flags)


def _readable(text: str) -> str:
    """The help with its description wrapped, and without "(default: None)", which says nothing."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\s│]", " ", found[0])  # so that a frame stays

    width = shutil.get_terminal_size().columns - 1
    text = re.sub(r"\(default:[\s│]*None\)", blank, text)
    lines = [
        textwrap.fill(line, width) if len(line) > width + 1 else line for line in text.split("\n")
    ]
    return "\n".join(lines)


# What tyro says, and how we say it; the groups are the flag and its value.
NUMBERS = (
    (r"Error parsing (\S+): .*(?:int\(\).*: |INT could .*from \[)(.*?)\]?\.?$", "whole number"),
    (r"Error parsing (\S+): .*(?:float: |FLOAT could .*from \[)(.*?)\]?\.?$", "number"),
)
CHOICE = r"invalid choice '(.*)' for argument '(.*)'. Expected one of \((.*)\)"
MISSING = r"Missing value for argument '(.*)'"


def _retold(box: str, command: str) -> UsageError:
    """tyro's box in a line of ours, or in its own words without the help that follows them."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)  # colours
    # A title, then, between rules, what is wrong and help; a blank line comes before details.
    lines = [line.strip("│╰╯ ") for line in plain.splitlines()[1:]]
    parts = "\n".join(line if line.strip("─-") else "" for line in lines).strip().split("\n\n")
    text = " ".join(parts[0].split("\n"))
    for pattern, wanted in NUMBERS:
        if found := re.match(pattern, text):
            return UsageError(f"{found[1]} must be a {wanted}, got {found[2]}")
    if found := re.match(CHOICE, text):
        return unknown(found[2], found[1], [name.strip("' ") for name in found[3].split(",")])
    if found := re.match(MISSING, text):
        return UsageError(f"{found[1]} needs a value")
    return UsageError(f"{text or 'wrong flags'}; neumann {command} --help lists them")


def _without_config(words: list[str]) -> tuple[list[str], Path | None]:
    """The words without --config, and its file."""
    for at, word in enumerate(words):
        if word.startswith("--config="):
            return [*words[:at], *words[at + 1 :]], Path(word.removeprefix("--config="))
        if word == "--config":
            if at + 1 == len(words):
                raise UsageError("--config needs a file")
            return [*words[:at], *words[at + 2 :]], Path(words[at + 1])
    return words, None


def _read(file: Path, kind: type[Any]) -> Any:
    """The settings in a TOML file of flags, or in a JSON file that a run or comparison has kept."""
    if file.suffix != ".json":
        return from_file(file, kind)
    content = read_object(file)
    values = {**content.get("settings", {}), **content.get("config", {})}
    if not values:
        raise UsageError(f"--config {file} holds no settings that a run has kept")
    for key in ("arms", "seeds", "search_seeds"):
        if key in content:
            values[key] = content[key]
    return from_mapping(values, kind)


def _as_words(config: Any, defaults: Any) -> list[str]:
    """As flags, so that the values of a file are looked at as those of flags are."""
    words: list[str] = []
    for field in dataclasses.fields(config):
        value, flag = getattr(config, field.name), field.name.replace("_", "-")
        if value is None or value == getattr(defaults, field.name):
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            words += [f"--{flag}", *map(str, value)]
        else:
            words.append(f"--{flag}={value}")
    return words
