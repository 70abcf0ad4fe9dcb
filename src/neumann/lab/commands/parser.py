"""Parse the command line: subcommands, flags, and --config files.

Code that a --config file or a run's folder names runs only if --allow-code names it too.

tyro turns the settings classes into subcommands; `flag_help` prints the help. Flags override a
--config file, which overrides the defaults. What cannot be parsed is a UsageError of one line.
tyro's own errors are boxes of several lines, so an invalid number or choice becomes an `_Invalid`
value, which is reported with the name of its flag once tyro is done.
"""

import argparse
import contextlib
import dataclasses
import io
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from neumann.lab.commands import compare, demo, report, spectrum, study, sweep, train
from neumann.lab.commands.arm_list import check_optimizer_names, print_arms
from neumann.lab.commands.flag_help import print_help
from neumann.lab.config import TrainConfig, flag_name
from neumann.lab.config_files import list_code, load_settings, parse_settings
from neumann.lab.errors import UsageError, unknown
from neumann.lab.storage.reading import read_json_object
from neumann.lab.studies.settings import CompareConfig, SpectrumConfig, SweepConfig
from neumann.lab.user_code import refuse_code


class Command(NamedTuple):
    settings: type[Any]  # a dataclass with the flags
    run: Callable[[Any], None]


COMMANDS = {  # as in `summaries`
    "train": Command(TrainConfig, train.run),
    "compare": Command(CompareConfig, compare.run),
    "sweep": Command(SweepConfig, sweep.run),
    "study": Command(study.StudyConfig, study.run),
    "spectrum": Command(SpectrumConfig, spectrum.run),
    "report": Command(report.ReportConfig, report.run),
    "demo": Command(demo.DemoConfig, demo.run),
}
CONFIG_HELP = "read defaults from a TOML file of flags, or the JSON settings of a run or study"
ALLOW_CODE_HELP = "allow a file or a run's folder to run this code"
NO_CONFIG = ("study", "report")  # commands without --config
RUN_CODE = ("train", "compare", "sweep", "study", "spectrum")  # commands that take --allow-code


def run_command(words: Sequence[str]) -> None:
    """Parse a command line and run its command. Raises SystemExit after printing the help."""
    name = words[0]
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    COMMANDS[name].run(parse_flags(name, words[1:]))


def parse_flags(command: str, words: Sequence[str]) -> Any:
    """The settings of a command: its defaults, those of a --config file, and flags."""
    kind = COMMANDS[command].settings
    flags, file, allowed = _split_files(command, words)
    defaults = kind()
    if file is not None:
        values = _read_config_file(file, kind)
        try:
            defaults = _parse(command, _as_flags(values, defaults), defaults)
        except UsageError as error:
            raise UsageError(f"--config {file}: {error}") from error
    if not {"-h", "--help"}.isdisjoint(flags):
        print_help(command, defaults, _list_further_flags(command))
        raise SystemExit
    config = _parse(command, flags, defaults)
    if file is not None and (code := list_code(config)):
        by_flags = list_code(_parse(command, flags, kind()))
        refuse_code(file, code, [*by_flags, *allowed])
    if isinstance(config, SpectrumConfig | study.StudyConfig):
        config = dataclasses.replace(config, allow_code=tuple(allowed))
    return config


def _parse(command: str, flags: list[str], defaults: Any) -> Any:
    """Let tyro parse flags; settings that they do not name have their value in `defaults`."""
    subcommands = []
    for name, (kind, _) in COMMANDS.items():
        default = defaults if name == command else kind()
        marker = tyro.conf.subcommand(name, default=default)
        subcommands.append(Annotated[kind, marker])
    union: Any = Union[tuple(subcommands)]  # noqa: UP007
    for word, following in itertools.pairwise([*flags, "--"]):
        if word == "--set" and following.startswith("--"):  # tyro takes it for an empty list
            raise UsageError("--set needs a value, such as --set epochs=1")
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # errors are reported below
            config, rest = tyro.cli(
                union,
                prog="neumann",
                args=[command, *flags],
                return_unknown_args=True,
                config=(tyro.conf.DisallowNone,),
                registry=_REGISTRY,
            )
    except SystemExit:
        raise _explain_failure(command, flags) from None
    if rest:
        raise _make_unexpected_error(command, rest[0])
    _check_values(config)
    if isinstance(config, TrainConfig):
        check_optimizer_names("--opt", [config.opt])
    if isinstance(config, CompareConfig | SweepConfig):
        check_optimizer_names("--arms", config.arms)
    return config


def _list_further_flags(command: str) -> dict[str, str]:
    """The flags that are not settings, with their texts."""
    further: dict[str, str] = {}
    if command not in NO_CONFIG:
        further["--config FILE"] = CONFIG_HELP
    if command in RUN_CODE:
        further["--allow-code MODULE:FUNCTION"] = ALLOW_CODE_HELP
    return {**further, "-h, --help": "print this help"}


# ---------------------------------------------------------------------- errors in one line


class _Invalid(NamedTuple):
    text: str
    expected: str | tuple[str, ...]  # a description, or the choices


_REGISTRY = ConstructorRegistry()


@_REGISTRY.primitive_rule
def _parse_numbers_and_choices(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    kind: Any = info.type
    choices: tuple[str, ...] = get_args(kind) if get_origin(kind) is Literal else ()
    if kind not in (int, float) and not choices:
        return None

    def parse(words: list[str]) -> Any:
        try:
            return choices[choices.index(words[0])] if choices else kind(words[0])
        except ValueError:
            number = "a whole number" if kind is int else "a number"
            return _Invalid(words[0], choices or number)

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join(choices) + "}" if choices else kind.__name__.upper(),
        instance_from_str=parse,
        is_instance=lambda value: value in choices if choices else isinstance(value, (kind, int)),
        str_from_instance=lambda value: [str(value)],
    )


def _check_values(config: Any) -> None:
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), flag_name(field.name)
        if isinstance(value, _Invalid):
            if isinstance(value.expected, str):
                raise UsageError(f"{name} must be {value.expected}, got {value.text!r}")
            raise unknown(name, value.text, value.expected)


def _make_unexpected_error(command: str, word: str) -> UsageError:
    if word.startswith("-"):
        return unknown("flag", word.partition("=")[0], _list_flags(command))
    return UsageError(f"unexpected argument {word!r}; neumann {command} --help lists the flags")


def _explain_failure(command: str, words: list[str]) -> UsageError:
    """The error for words that tyro rejects, such as a flag without its value."""
    fields = dataclasses.fields(COMMANDS[command].settings)
    known = {flag_name(f.name) for f in fields if bool not in (f.type, *get_args(f.type))}
    for word, following in itertools.pairwise([*words, "--"]):
        if word in known and following.startswith("--"):
            if word == "--opt":
                print_arms()
            return UsageError(f"{word} needs a value")
    for word in words:
        if word.startswith("--") and word.partition("=")[0] not in _list_flags(command):
            return _make_unexpected_error(command, word)
    return UsageError(f"cannot parse {' '.join(words)!r}; neumann {command} --help lists the flags")


def _list_flags(command: str) -> list[str]:
    kind = COMMANDS[command].settings
    hints = get_type_hints(kind, include_extras=True)
    given = [
        flag_name(field.name)
        for field in dataclasses.fields(kind)
        if tyro.conf.Positional not in getattr(hints[field.name], "__metadata__", ())
    ]
    given.append("--help")
    given += [] if command in NO_CONFIG else ["--config"]
    return [*given, "--allow-code"] if command in RUN_CODE else given


# ---------------------------------------------------------------------- --config, --allow-code


def _split_files(
    command: str, words: Sequence[str]
) -> tuple[list[str], Path | None, Sequence[str]]:
    """Take --config FILE and every --allow-code MODULE:FUNCTION out of the words.

    They are not settings, so a file cannot name another file or allow its own code.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", type=Path)
    if command in RUN_CODE:
        parser.add_argument("--allow-code", action="append", default=[])
    try:
        found, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        name = error.argument_name or "--config"
        what = "a file" if name == "--config" else "MODULE:FUNCTION"
        raise UsageError(f"{name} needs {what}") from None
    return rest, found.config, getattr(found, "allow_code", ())


def _read_config_file(file: Path, kind: type[Any]) -> Any:
    """Read a TOML file of flags, or a JSON file that a run or a study has written."""
    if file.suffix != ".json":
        return load_settings(file, kind)
    content = read_json_object(file)
    values = {**content.get("settings", {}), **content.get("config", {})}
    if not values:
        raise UsageError(f"--config {file} holds no settings of a run")
    written_apart = ("arms", "seeds", "search_seeds")
    values |= {key: content[key] for key in written_apart if key in content}
    return parse_settings(values, kind)


def _as_flags(config: Any, defaults: Any) -> list[str]:
    """Write the values of a file as flags, so that they are checked like flags."""
    words: list[str] = []
    for field in dataclasses.fields(config):
        value, flag = getattr(config, field.name), flag_name(field.name)
        if value is None or value == getattr(defaults, field.name):
            continue
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list | tuple):
            words += [flag, *map(str, value)]
        else:
            words.append(f"{flag}={value}")
    return words
