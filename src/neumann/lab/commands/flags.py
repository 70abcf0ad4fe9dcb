"""The flags of a command, made from its settings; nothing here waits for torch.

A setting is a flag with the same name. Beside these there are --config, --allow-code and --help.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tyro

from neumann.lab.commands.settings_source import Setting, get_extras, read_settings

SETTINGS = {  # the class of each command's settings; the commands are those of `summaries`
    "train": "neumann.lab.config:TrainConfig",
    "compare": "neumann.lab.studies.settings:CompareConfig",
    "sweep": "neumann.lab.studies.settings:SweepConfig",
    "study": "neumann.lab.commands.study:StudyConfig",
    "spectrum": "neumann.lab.studies.settings:SpectrumConfig",
    "report": "neumann.lab.commands.report:ReportConfig",
    "demo": "neumann.lab.commands.demo:DemoConfig",
}
HIDDEN = ("allow_code",)  # settings that the command line fills in another way
NO_CONFIG = ("study", "report")  # commands without --config
RUN_CODE = ("train", "compare", "sweep", "study", "spectrum")  # commands that take --allow-code
METAVARS = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}


@dataclass(frozen=True)
class Flag:
    """A flag of a command, or an argument, whose name has no dashes."""

    names: tuple[str, ...]
    text: str
    metavar: str = ""  # what its value is; empty: it takes none
    kind: type[Any] = str  # of its value
    choices: tuple[str, ...] = ()  # its possible values; empty: any of its kind
    several: bool = False  # whether it takes any number of values
    setting: str = ""  # that it sets; empty: none

    @property
    def forms(self) -> tuple[str, ...]:
        """What may be written: its names, and --no-NAME if it turns a setting on."""
        if not self.setting or self.metavar or self.is_argument:
            return self.names
        return tuple(dict.fromkeys((*self.names, self.names[0].replace("--", "--no-", 1))))

    @property
    def usage(self) -> str:
        names = ", ".join(self.names)
        return f"{names} {self.metavar}" if self.metavar else names

    @property
    def is_argument(self) -> bool:
        return not self.names[0].startswith("-")


CONFIG = Flag(
    ("--config",),
    "read defaults from a TOML file of flags, or the JSON settings of a run or study",
    "FILE",
)
ALLOW_CODE = Flag(
    ("--allow-code",), "allow a file or a run's folder to run this code", "MODULE:FUNCTION"
)
HELP = Flag(("-h", "--help"), "print this help")


def list_flags(command: str, values: Mapping[str, Any] | None = None) -> list[Flag]:
    """List the flags of a command. `values` are shown as defaults in place of its own."""
    settings = read_settings(SETTINGS[command]).settings
    further = [
        *([] if command in NO_CONFIG else [CONFIG]),
        *([ALLOW_CODE] if command in RUN_CODE else []),
        HELP,
    ]
    return [*describe_flags(settings, values), *further]


def describe_flags(
    settings: Mapping[str, Setting], values: Mapping[str, Any] | None = None
) -> list[Flag]:
    return [
        _describe_flag(setting, (values or {}).get(name, setting.default))
        for name, setting in settings.items()
        if name not in HIDDEN
    ]


def _describe_flag(setting: Setting, default: Any) -> Flag:
    extras, name = get_extras(setting.hint), f"--{setting.name.replace('_', '-')}"
    plain = get_args(setting.hint)[0] if extras else setting.hint
    kinds = [each for each in get_args(plain) or (plain,) if each is not type(None)]
    if tyro.conf.Positional in extras:
        return Flag((setting.name.upper(),), setting.text, setting=setting.name)
    if kinds == [bool]:
        names = (name,) if default is False else (name, name.replace("--", "--no-", 1))
        return Flag(names, setting.text, setting=setting.name)
    choices = _list_choices(plain, kinds)
    several = get_origin(plain) is tuple
    kind = str if several or choices else kinds[0]
    metavar = "{" + ",".join(choices) + "}" if choices else METAVARS[kind]
    return Flag(
        (name,),
        setting.text + _describe_default(default),
        f"{metavar} …" if several else metavar,
        kind,
        choices,
        several,
        setting.name,
    )


def _list_choices(plain: Any, kinds: list[Any]) -> tuple[str, ...]:
    if get_origin(plain) is Literal:
        return tuple(kinds)
    return get_args(kinds[0]) if get_origin(kinds[0]) is Literal else ()


def _describe_default(default: Any) -> str:
    if default is None or default == ():
        return ""
    shown = " ".join(default) if isinstance(default, tuple) else default
    return f" (default: {shown:g})" if isinstance(shown, float) else f" (default: {shown})"
