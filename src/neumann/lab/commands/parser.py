"""Parse the command line: subcommands, flags, and --config files.

Code that a --config file or a run's folder names runs only if --allow-code names it too.

`flag_check` refuses what cannot be parsed in a UsageError of one line, since tyro's own errors are
boxes of several lines. tyro then turns the words into settings, and `flag_help` prints the help.
Flags override a --config file, which overrides the defaults.
"""

import argparse
import contextlib
import dataclasses
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Union

import tyro

from neumann.lab.commands import compare, demo, report, spectrum, study, sweep, train
from neumann.lab.commands.arm_list import check_optimizer_names
from neumann.lab.commands.flag_check import MISSING, check_words
from neumann.lab.commands.flag_help import print_help
from neumann.lab.commands.flags import HELP, RUN_CODE
from neumann.lab.config import TrainConfig, flag_name
from neumann.lab.config_files import list_code, load_settings, parse_settings
from neumann.lab.errors import UsageError
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


def run_command(words: Sequence[str]) -> None:
    """Parse a command line and run its command. Raises SystemExit after printing the help."""
    command, *flags = words
    COMMANDS[command].run(parse_flags(command, flags))


def parse_flags(command: str, words: Sequence[str]) -> Any:
    """The settings of a command: its defaults, those of a --config file, and flags."""
    kind = COMMANDS[command].settings
    wants_help = not {*HELP.names}.isdisjoint(words)
    if not wants_help:
        check_words(command, words)
    flags, file, allowed = _split_files(command, words)
    defaults = kind()
    if file is not None:
        of_file = _as_flags(_read_config_file(file, kind), defaults)
        try:
            check_words(command, of_file)
            defaults = _parse(command, of_file, defaults)
        except UsageError as error:
            raise UsageError(f"--config {file}: {error}") from error
    if wants_help:
        print_help(command, vars(defaults))
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
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            config = tyro.cli(
                union,
                prog="neumann",
                args=[command, *flags],
                config=(tyro.conf.DisallowNone,),
            )
    except SystemExit:  # tyro is stricter than our check
        words = " ".join(flags)
        raise UsageError(
            f"cannot parse {words!r}; neumann {command} --help lists the flags"
        ) from None
    if isinstance(config, TrainConfig):
        check_optimizer_names("--opt", [config.opt])
    if isinstance(config, CompareConfig | SweepConfig):
        check_optimizer_names("--arms", config.arms)
    return config


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
    except argparse.ArgumentError as error:  # such as --config -1e3
        name = str(error.argument_name)
        raise UsageError(f"{name} {MISSING[name]}") from None
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
